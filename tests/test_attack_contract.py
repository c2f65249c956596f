"""The contract of attacks: errors before any work, every kind of model, counts, traces."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import attacks, losses
from he_keras.attacks import (
    BIM,
    FGSM,
    MIM,
    PGD,
    AdaptivePGD,
    Attack,
    Crafted,
    ProjectedGradient,
    Victim,
)

THREAT = he.ThreatModel("linf", 0.05)
PIXELS, CLASSES = 12, 4
PARITY = {"random_start": False, "keep": "last", "stop_when_broken": False}


@functools.cache
def weights():
    random = np.random.default_rng(0)
    return random.normal(size=(PIXELS, CLASSES)).astype(np.float32)


@functools.cache
def images(count=20):
    return np.random.default_rng(1).uniform(size=(count, 2, 2, 3)).astype(np.float32)


def linear(batch):
    return tf.linalg.matmul(tf.reshape(batch, [-1, PIXELS]), tf.cast(weights(), batch.dtype))


def labels(count=20):
    """What `linear` predicts, but for every fifth image."""
    predicted = linear(tf.constant(images(count))).numpy().argmax(axis=1)
    predicted[::5] = (predicted[::5] + 1) % CLASSES
    return predicted


class Counting:
    """A linear classifier that counts how often Python runs it, and which batch sizes it sees."""

    def __init__(self, model=linear):
        self.model = model
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        return self.model(batch)


# Errors: what, expected, received; before any work.


BAD_EXAMPLES = {
    "integer images": ((images() * 255).astype(np.uint8), labels(), "dtype=uint8"),
    "images in 0..255": (images() * 255, labels(), "outside the threat model's bounds"),
    "negative images": (images() - 0.5, labels(), "outside the threat model's bounds"),
    "just outside": (np.full((1, 2), 1.00001, np.float32), [0], "outside the threat model's"),
    "NaN": (np.full((1, 2), np.nan, np.float32), [0], "or NaN"),
    "infinity": (np.full((1, 2), np.inf, np.float32), [0], "outside the threat model's bounds"),
    "no example": (images()[:0], labels()[:0], "No examples"),
    "no batch axis": (images()[0, 0, 0], labels()[:3], r"shape=\(3,\)"),
    "labels missing": (images(), labels()[:-1], r"expected integers of shape \(20,\)"),
    "one-hot labels": (images(), np.eye(CLASSES)[labels()], r"shape=\(20, 4\)"),
    "float labels": (images(), labels() / 1.0, "dtype=float64"),
    "boolean labels": (images(), labels() > 0, "dtype=bool"),
    "negative label": (images(), labels() - 5, "Negative label; expected labels >= 0"),
}


@pytest.mark.parametrize("name", BAD_EXAMPLES)
def test_bad_examples_are_refused_before_the_model_runs(name):
    bad_images, bad_labels, message = BAD_EXAMPLES[name]
    model = Counting()
    with pytest.raises(ValueError, match=message) as error:
        PGD(THREAT, 3)(model, bad_images, bad_labels)
    assert model.calls == 0
    assert "; expected" in str(error.value) and "received" in str(error.value)


@pytest.mark.parametrize("ids", [np.arange(19), np.arange(20) / 2, np.arange(20)[:, None]])
def test_bad_example_ids_are_refused_before_the_model_runs(ids):
    model = Counting()
    with pytest.raises(ValueError, match=r"expected integers of shape \(20,\); received"):
        PGD(THREAT, 3)(model, images(), labels(), example_ids=ids)
    assert model.calls == 0


BAD_MODELS = {
    "not callable": (5, TypeError, "expected a keras.Model or a callable"),
    "NumPy": (lambda batch: np.zeros((8, 4)), TypeError, "floating-point TensorFlow tensor"),
    "a dictionary": (lambda batch: {"logits": linear(batch)}, TypeError, "TensorFlow tensor"),
    "class numbers": (lambda batch: tf.argmax(linear(batch), 1), TypeError, "dtype=int64"),
    "a score": (lambda batch: linear(batch)[:, 0], ValueError, "Not a classifier"),
    "a feature map": (lambda batch: batch, ValueError, r"received shape \(8, 2, 2, 3\)"),
    "one row for all": (lambda batch: linear(batch)[:1], ValueError, r"shape \(8, classes\)"),
    "too few classes": (lambda batch: linear(batch)[:, :2], ValueError, r"expected 0\.\.1"),
    "probabilities": (lambda batch: tf.nn.softmax(linear(batch)), ValueError, "the softmax"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_refused_after_one_small_batch(name):
    model, error_type, message = BAD_MODELS[name]
    counting = Counting(model) if callable(model) else model
    with pytest.raises(error_type, match=message) as error:
        PGD(THREAT, 3)(counting, images(), labels())
    assert "; expected" in str(error.value) and "received" in str(error.value)
    assert not callable(model) or counting.calls == 1


def test_scaled_probabilities_are_still_probabilities():
    with pytest.raises(ValueError, match="returns probabilities"):
        PGD(THREAT, 3, logit_scale=20.0)(BAD_MODELS["probabilities"][0], images(), labels())


def test_a_huge_label_is_not_wrapped_around():
    with pytest.raises(ValueError, match=r"expected 0\.\.3"):
        FGSM(THREAT)(linear, images(), labels().astype(np.int64) + 2**32)


def test_a_loss_says_how_many_classes_it_needs():
    with pytest.raises(
        ValueError, match="Too few classes for pgd; expected at least 3; received 2"
    ):
        PGD(THREAT, loss="dlr")(lambda batch: linear(batch)[:, :2], images(), labels() // 2)


def test_a_model_without_gradient_is_not_called_robust():
    """Zeros in place of a missing gradient would leave every image unbroken."""
    rounded = tf.constant(weights())

    def hard(batch):
        return tf.ensure_shape(
            tf.numpy_function(lambda array: array.reshape(-1, 12) @ rounded, [batch], tf.float32),
            [None, CLASSES],
        )

    with pytest.raises(ValueError, match="needs gradients; expected .*; received"):
        PGD(THREAT, 3)(hard, images(), linear(images()).numpy().argmax(axis=1))


BAD_ARGUMENTS = {
    "threat": ({"threat": "linf"}, TypeError, "expected a ThreatModel; received threat='linf'"),
    "no steps": ({"num_steps": 0}, ValueError, "expected an integer >= 1; received num_steps=0"),
    "half a step": ({"num_steps": 2.5}, ValueError, "num_steps=2.5"),
    "true steps": ({"num_steps": True}, ValueError, "num_steps=True"),
    "zero step": ({"step_size": 0}, ValueError, "expected > 0; received step_size=0"),
    "backward step": ({"step_size": -0.1}, ValueError, "step_size=-0.1"),
    "step of text": ({"step_size": "big"}, ValueError, "received value='big'"),
    "step of NaN": ({"step_size": np.nan}, ValueError, "received value=nan"),
    "loss": ({"loss": "mse"}, ValueError, r"expected one of \('kl', 'ce', 'cw', 'dlr'\)"),
    "start": ({"random_start": "normal"}, ValueError, "received random_start='normal'"),
    "no start": ({"random_start": None}, ValueError, "received random_start=None"),
    "negative radius": ({"random_start": -0.1}, ValueError, "received random_start=-0.1"),
    "kl": ({"loss": "kl", "random_start": False}, ValueError, "zero gradient at the image itself"),
    "kl, radius 0": ({"loss": "kl", "random_start": 0}, ValueError, "expected a random start"),
    "decay": ({"decay": -1.0}, ValueError, "expected a finite number >= 0.0; received decay=-1.0"),
    "decay of NaN": ({"decay": np.nan}, ValueError, "received decay=nan"),
    "margin": ({"margin": "head"}, ValueError, "received margin='head'"),
    "no margin": ({"margin": None}, ValueError, "received margin=None"),
    "keep": ({"keep": "first"}, ValueError, r"expected one of \('best', 'last'\)"),
    "restarts": ({"num_restarts": 0}, ValueError, "received num_restarts=0"),
    "batch size": ({"batch_size": 0}, ValueError, "received batch_size=0"),
    "seed of text": ({"seed": "a"}, ValueError, r"expected an integer in 0\.\.2\*\*31-1"),
    "negative seed": ({"seed": -1}, ValueError, "received seed=-1"),
    "stopping": ({"stop_when_broken": "no"}, TypeError, "received stop_when_broken='no'"),
    "scale of text": ({"logit_scale": "head"}, ValueError, "received logit_scale='head'"),
    "zero scale": ({"logit_scale": 0.0}, ValueError, "received logit_scale=0.0"),
    "infinite scale": ({"logit_scale": np.inf}, ValueError, "received logit_scale=inf"),
    "true scale": ({"logit_scale": True}, ValueError, "received logit_scale=True"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_the_constructor(name):
    arguments, error_type, message = BAD_ARGUMENTS[name]
    with pytest.raises(error_type, match=message) as error:
        ProjectedGradient(**{"threat": THREAT, **arguments})
    assert "; expected" in str(error.value) and "received" in str(error.value)


@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd-3", "mim-3"])
def test_a_missing_threat_model_is_named(name):
    with pytest.raises(TypeError, match="expected a ThreatModel; received threat=None"):
        attacks.get(name, None)


@pytest.mark.parametrize("name", ["pgdd-20", "fgsm-20", "pgd-", "pgd-x", "", "20", None])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(ValueError, match="Unknown attack; expected one of .*bim-K.*fgsm.*pgd-K"):
        attacks.get(name, THREAT)


def test_names():
    assert attacks.get("PGD-7", THREAT).num_steps == 7
    assert attacks.get("pgd-7", THREAT).name == "pgd-7"
    assert attacks.get("pgd", THREAT).num_steps == 20
    assert attacks.get("pgd-7", THREAT, step_size=0.003, name="mine").name == "mine"
    with pytest.raises(ValueError, match="num_steps is given twice"):
        attacks.get("pgd-7", THREAT, num_steps=20)
    with pytest.raises(ValueError, match="num_steps=0"):
        attacks.get("pgd-0", THREAT)
    with pytest.raises(ValueError, match="registered twice"):
        attacks.register("pgd")(PGD)
    assert set(attacks.names()) >= {"fgsm", "bim-K", "pgd-K", "mim-K", "cw-linf-K"}


def test_an_attack_must_define_run():
    with pytest.raises(TypeError, match="Attack is not an attack; expected"):
        Attack(THREAT)(linear, images(), labels())


class Careless(Attack):
    """Leaves ball and bounds in every pixel but the first, which becomes NaN."""

    def run(self, victim, images, labels, seeds):
        far = tf.concat([images[:, :1] * np.nan, images[:, 1:] + 10.0], axis=1)
        passes = tf.zeros_like(labels)
        return Crafted(far, passes, passes)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_base_class_keeps_the_promises_of_careless_attacks(norm):
    threat = he.ThreatModel(norm, 0.05, bounds=(-0.2, 1.1))
    result = Careless(threat, stop_when_broken=False)(linear, images() * 1.3 - 0.2, labels())
    assert np.isfinite(result.x_adv).all()
    assert result.x_adv.min() >= -0.2 and result.x_adv.max() <= 1.1
    assert 0 <= result.distance.min() and result.distance.max() <= 0.05 + 1e-6
    verdicts = linear(tf.constant(result.x_adv)).numpy().argmax(axis=1) != labels()
    np.testing.assert_array_equal(result.success, verdicts)
    np.testing.assert_array_equal(result.forward_passes, 2)
    if norm == "linf":
        flat, clean = result.x_adv.reshape(20, -1), (images() * 1.3 - 0.2).reshape(20, -1)
        np.testing.assert_allclose(flat[:, 6:], np.minimum(clean[:, 6:] + 0.05, 1.1), atol=1e-6)
        np.testing.assert_allclose(flat[:, :6], clean[:, :6], atol=1e-6)


# Models of every kind.


class Subclassed(keras.Model):
    """Without a `training` argument, and built by its first call."""

    def __init__(self):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(
            CLASSES, use_bias=False, kernel_initializer=keras.initializers.Constant(weights())
        )

    def call(self, batch):
        return self.dense(self.flatten(batch))


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(weights())

    def logits(self, batch):
        return tf.reshape(batch, [-1, PIXELS]) @ self.weights

    @tf.function
    def compiled_logits(self, batch):
        return self.logits(batch)


# A `tf.function` that is a method keeps only a weak reference to its object.
MODULE = Module()


def dense():
    layer = keras.layers.Dense(CLASSES, use_bias=False)
    layer.build((None, PIXELS))
    layer.set_weights([weights()])
    return layer


def functional():
    inputs = keras.Input((2, 2, 3))
    return keras.Model(inputs, dense()(keras.layers.Flatten()(inputs)))


MODELS = {
    "functional": functional,
    "sequential": lambda: keras.Sequential([keras.layers.Flatten(), dense()]),
    "subclassed": Subclassed,
    "adversarial": lambda: he.HEAdversarialModel(
        keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten()]), dense()
    ),
    "layer": lambda: keras.layers.Pipeline([keras.layers.Flatten(), dense()]),
    "lambda": lambda: lambda batch: linear(batch),
    "partial": lambda: functools.partial(linear),
    "object": Counting,
    "tf.function": lambda: tf.function(linear),
    "bound method": lambda: Module().logits,
    "compiled bound method": lambda: MODULE.compiled_logits,
    "python branches": lambda: branching,
}


@functools.cache
def result_on_linear():
    return PGD(THREAT, 3)(linear, images(), labels())


def branching(batch):
    """Autograph turns the `if` on a tensor into graph code, as it would in a `tf.function`."""
    if tf.reduce_sum(batch) < 0:
        return -linear(batch)
    return linear(batch)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_is_attacked_alike(kind):
    attack = PGD(THREAT, 3, batch_size=8)
    expected = result_on_linear()
    result = attack(MODELS[kind](), images(), labels())
    np.testing.assert_allclose(result.x_adv, expected.x_adv, atol=1e-6)
    np.testing.assert_array_equal(result.success, expected.success)
    assert result.robust_accuracy == pytest.approx(1 - expected.success.mean())


def test_keras_models_run_in_inference_mode():
    """Dropout and batch norm in training mode would change the logits and the statistics."""
    layers = keras.layers
    stack = [layers.Flatten(), layers.BatchNormalization(), layers.Dropout(0.9), dense()]
    model = keras.Sequential([keras.Input((2, 2, 3)), *stack])
    alone = keras.layers.Pipeline(stack)
    batch = tf.constant(images())
    inference = model(batch, training=False)
    for wrapped in (model, alone):
        np.testing.assert_array_equal(Victim(wrapped).logits(batch), inference)
    before = stack[1].get_weights()
    PGD(THREAT, 2)(model, images(), labels())
    for old, new in zip(before, stack[1].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    Victim(model, training=True).logits(batch)
    assert np.abs(stack[1].get_weights()[2] - before[2]).max() > 0


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float64])
def test_logits_of_another_precision(dtype):
    expected = result_on_linear()
    result = PGD(THREAT, 3)(lambda batch: tf.cast(linear(batch), dtype), images(), labels())
    assert result.x_adv.dtype == np.float32
    assert np.mean(result.success == expected.success) >= 0.9


@pytest.mark.parametrize(("given", "returned"), [("float64", "float64"), ("float16", "float32")])
def test_dtype_of_the_images(given, returned):
    model = functional()
    for callable_model in (model, linear):
        result = PGD(THREAT, 3)(callable_model, images().astype(given), labels())
        assert result.x_adv.dtype == np.dtype(returned)
        assert result.distance.max() <= 0.05 + 1e-6
        assert result.success.any() and not result.success.all()


def test_labels_of_every_integer_type_and_as_a_column():
    attack = BIM(THREAT, 2)
    expected = attack(linear, images(), labels())
    for given in (labels().astype(np.uint8), labels()[:, None], tf.constant(labels()), [*labels()]):
        result = attack(linear, tf.constant(images()), given)
        np.testing.assert_array_equal(result.x_adv, expected.x_adv)


def test_one_attack_for_images_of_two_shapes():
    """Not relaxed to images of unknown shape, which models that reshape could not take."""
    attack = BIM(THREAT, 2)

    def corner(batch):
        return tf.reshape(batch, [-1, batch.shape[1] * batch.shape[2] * 3])[:, :PIXELS] @ weights()

    for size in (2, 4, 6, 2):
        batch = np.random.default_rng(size).uniform(size=(5, size, size, 3)).astype(np.float32)
        assert attack(corner, batch, np.zeros(5, int)).x_adv.shape == batch.shape


# Numbers that are not finite, gradients that are zero.


def test_nan_is_reported_and_counted_as_broken():
    def brittle(batch):
        is_bright = batch[:, :1, 0, 0] > 0.5
        return tf.where(is_bright, np.nan, linear(batch))

    right = linear(images()).numpy().argmax(axis=1)
    result = PGD(THREAT, 5)(brittle, images(), right)
    bright = images()[:, 0, 0, 0] > 0.5
    assert 0 < bright.sum() < len(bright)
    np.testing.assert_array_equal(result.non_finite[bright], True)
    np.testing.assert_array_equal(result.success[bright], True)
    np.testing.assert_array_equal(result.x_adv[bright], images()[bright])
    assert np.isfinite(result.x_adv).all()
    # An attack may also find the edge beyond which the model returns NaN.
    at_the_edge = ~bright & result.non_finite
    assert np.all(result.x_adv[at_the_edge][:, 0, 0, 0] > 0.5)
    np.testing.assert_array_equal(result.success[at_the_edge], True)
    assert (~result.non_finite & ~result.success).any()


def test_nan_everywhere_leaves_finite_images():
    result = PGD(THREAT, 3, stop_when_broken=False)(
        lambda x: linear(x) * np.nan, images(), labels()
    )
    assert result.non_finite.all() and result.success.all()
    assert np.isfinite(result.x_adv).all() and result.distance.max() <= 0.05 + 1e-6


def test_infinite_logits_are_reported():
    result = BIM(THREAT, 2)(lambda x: linear(x) * np.inf, images(), labels())
    assert result.non_finite.all() and np.isfinite(result.x_adv).all()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("factor", [0.0, np.nan], ids=["zero", "NaN"])
def test_zero_and_nan_gradients_leave_the_image(norm, factor):
    @tf.custom_gradient
    def with_gradient_factor(batch):
        return tf.identity(batch), lambda upstream: upstream * factor

    def model(batch):
        return linear(with_gradient_factor(batch))

    threat = he.ThreatModel(norm, 0.05)
    right = linear(images()).numpy().argmax(axis=1)
    for attack in (BIM(threat, 3), MIM(threat, 3)):
        result = attack(model, images(), right)
        np.testing.assert_allclose(result.x_adv, images(), atol=1e-7)
        assert not result.success.any() and not result.non_finite.any()
    ids = np.stack([np.zeros(20, np.int32), np.arange(20, dtype=np.int32)], axis=1)
    expected = threat.random_start(tf.constant(images()), ids)
    assert np.abs(expected - images()).max() > 1e-4
    started = MIM(threat, 3, keep="last", stop_when_broken=False, random_start=True)
    np.testing.assert_allclose(started(model, images(), right).x_adv, expected, atol=1e-6)


# Who is attacked, for how long, and what is counted.


def test_examples_that_are_all_wrong_never_reach_the_attack():
    """Models that cannot run on an empty batch must not be asked to."""

    def never_empty(batch):
        check = tf.debugging.assert_positive(tf.shape(batch)[0], "an empty batch")
        with tf.control_dependencies([check]):
            return linear(batch)

    right = linear(images()).numpy().argmax(axis=1)
    wrong = (right + 1) % CLASSES
    for options in ({}, {"loss": "kl"}, {"num_restarts": 3}, {"keep": "last"}):
        result = PGD(THREAT, 3, batch_size=6, **options)(never_empty, images(), wrong)
        assert result.success.all() and result.robust_accuracy == 0.0
        np.testing.assert_array_equal(result.x_adv, images())
        np.testing.assert_array_equal(result.forward_passes, 1)
        np.testing.assert_array_equal(result.backward_passes, 0)
    mixed = np.concatenate([wrong[:6], right[6:12], wrong[12:]])
    result = PGD(THREAT, 3, batch_size=6)(never_empty, images(), mixed)
    np.testing.assert_array_equal(result.forward_passes[[*range(6), *range(12, 20)]], 1)
    assert np.all(result.forward_passes[6:12] > 1)


def test_ragged_batches():
    expected = BIM(THREAT, 4)(linear, images(), labels())
    attack = BIM(THREAT, 4, batch_size=8)
    for count in (1, 2, 7, 8, 9, 16, 17, 20):
        result = attack(linear, images()[:count], labels()[:count])
        np.testing.assert_allclose(result.x_adv, expected.x_adv[:count], atol=1e-6)
        np.testing.assert_array_equal(result.success, expected.success[:count])
        np.testing.assert_array_equal(result.forward_passes, expected.forward_passes[:count])


def test_stopping_early_changes_no_verdict():
    """Dropping broken rows, and padding what is left, must not mix up the others."""
    attack = functools.partial(BIM, he.ThreatModel("linf", 0.08), 12, step_size=0.008)
    stopped = attack()(linear, images(90), labels(90))
    whole = attack(stop_when_broken=False)(linear, images(90), labels(90))
    np.testing.assert_array_equal(stopped.success, whole.success)
    held = ~whole.success
    assert held.any()
    np.testing.assert_allclose(stopped.x_adv[held], whole.x_adv[held], atol=1e-6)
    # Where the last iterate is kept, it is the one that broke the example, not a later one.
    frozen = attack(keep="last")(linear, images(90), labels(90))
    np.testing.assert_array_equal(frozen.success, whole.success)
    np.testing.assert_allclose(frozen.x_adv, stopped.x_adv, atol=1e-6)
    spent = stopped.backward_passes[~held]
    assert len(set(spent.tolist())) > 3
    np.testing.assert_array_equal(whole.backward_passes, 12)


class Rows(tf.Module):
    """Counts the rows that really pass through the model, inside compiled loops too."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0)

    def __call__(self, batch):
        self.seen.assign_add(tf.shape(batch)[0])
        return linear(batch)


@pytest.mark.parametrize("num_steps", [1, 9])
@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"keep": "last"}, 2),
        ({"keep": "best"}, 3),
        ({"keep": "best", "loss": "kl"}, 4),
        ({"keep": "best", "num_restarts": 3}, 3),
    ],
    ids=["last", "best", "kl", "restarts"],
)
def test_counted_passes_are_the_passes_made(num_steps, options, extra):
    model = Rows()
    attack = PGD(THREAT, num_steps, stop_when_broken=False, batch_size=8, **options)
    result = attack(model, images(), labels())
    runs = options.get("num_restarts", 1)
    np.testing.assert_array_equal(result.forward_passes, runs * (num_steps + extra))
    np.testing.assert_array_equal(result.backward_passes, runs * num_steps)
    probed = 8
    assert model.seen.numpy() == result.forward_passes.sum() + probed


def test_restarts_go_on_with_the_survivors_and_never_get_weaker():
    def passes(result):
        return result.forward_passes, result.backward_passes

    def margins(result):
        return losses.margin(linear(tf.constant(result.x_adv)), tf.constant(labels())).numpy()

    # Few short steps, so that the start decides.
    attack = functools.partial(PGD, he.ThreatModel("linf", 0.1), 2, step_size=0.01, batch_size=8)
    runs = [attack(num_restarts=count)(linear, images(), labels()) for count in (1, 2, 5)]
    broken = [run.success.sum() for run in runs]
    assert broken[0] < broken[-1] < len(labels())
    held_margins = [margins(run)[~runs[-1].success] for run in runs]
    assert held_margins[0].mean() > held_margins[-1].mean() + 1e-3
    for earlier, later in zip(runs, runs[1:], strict=False):
        done = earlier.success
        np.testing.assert_array_equal(later.x_adv[done], earlier.x_adv[done])
        assert np.all(later.success[done])
        assert np.all(margins(later)[~done] <= margins(earlier)[~done] + 1e-6)
        for before, after in zip(passes(earlier), passes(later), strict=True):
            np.testing.assert_array_equal(after[done], before[done])
            assert np.all(after[~done] > before[~done])
    held = ~runs[-1].success
    np.testing.assert_array_equal(runs[-1].backward_passes[held], 5 * 2)
    np.testing.assert_array_equal(runs[-1].forward_passes[held], 5 * (2 + 3))


def test_keep_last_returns_the_last_iterate_and_best_the_strongest():
    """The loss rises, then falls: with one pixel, from 0.5 upward to 0.7, past the peak at 0.6."""

    def peaked(batch):
        score = 5.0 - 100.0 * tf.square(batch[:, 0] - 0.6)
        # Ascending in x0 by construction, whatever the side of the peak.
        climb = batch[:, 0] - tf.stop_gradient(batch[:, 0])
        flat = tf.stop_gradient(score) + climb
        return tf.stack([10.0 * tf.ones_like(flat), flat], axis=1)

    threat, start = he.ThreatModel("linf", 0.2), np.array([[0.5]])
    settings = {"step_size": 0.05, "random_start": False, "stop_when_broken": False}
    last = PGD(threat, 4, keep="last", **settings)(peaked, start, np.array([0]))
    np.testing.assert_allclose(last.x_adv, [[0.7]], atol=1e-6)
    best = PGD(threat, 4, keep="best", **settings)(peaked, start, np.array([0]))
    np.testing.assert_allclose(best.x_adv, [[0.6]], atol=1e-6)
    assert best.forward_passes[0] == last.forward_passes[0] + 1


@pytest.mark.parametrize("random_start", ["gaussian", 0.2], ids=["gaussian", "wide"])
def test_a_start_outside_the_ball_or_the_bounds_is_not_taken_for_a_success(random_start):
    """Misclassified only below 0, or only beyond epsilon: no allowed image is."""
    edge = 0.0 if random_start == "gaussian" else 0.5 - 0.06

    def below_the_edge(batch):
        score = 1e6 * (edge - batch[:, 0]) - 1.0
        return tf.stack([tf.zeros_like(score), score], axis=1)

    pixels = np.full((50, 1), 0.0 if random_start == "gaussian" else 0.5, np.float32)
    attack = PGD(THREAT, 3, step_size=1e-6, random_start=random_start)
    result = attack(below_the_edge, pixels, np.zeros(50, int))
    assert not result.success.any()
    np.testing.assert_array_equal(result.backward_passes, 3)


# Scale and margin.


def cosine_model(scale=15.0, margin=0.2):
    network = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten()])
    head = he.CosineHead(CLASSES, scale=scale, margin=margin)
    model = he.HEAdversarialModel(network, head)
    head.set_weights([weights()])
    return model


def test_logit_scale_of_a_cosine_head_and_of_any_other():
    model, batch = cosine_model(), tf.constant(images())
    cosines = model.cosines(batch).numpy()
    chained = keras.Sequential([model.network, model.head])
    for wrapped in (model, chained):
        for logit_scale, factor in (("model", 15.0), ("unit", 1.0), (4.0, 4.0), (2, 2.0)):
            victim = Victim(wrapped, logit_scale)
            np.testing.assert_allclose(victim.logits(batch), factor * cosines, rtol=1e-5, atol=1e-6)
            assert victim.scale == factor
    for logit_scale, factor in (("model", 1.0), ("unit", 1.0), (4.0, 4.0)):
        victim = Victim(linear, logit_scale)
        np.testing.assert_allclose(victim.logits(batch), factor * linear(batch), rtol=1e-6)


def test_the_scale_changes_cross_entropy_attacks_but_not_the_margin_attack():
    # One l2 step shows the direction; signs would hide most of the change.
    model, threat = cosine_model(), he.ThreatModel("l2", 0.01)
    right = model(images()).numpy().argmax(axis=1)

    def perturbed(loss, logit_scale):
        attack = FGSM(threat, loss=loss, logit_scale=logit_scale, keep="last")
        return attack(model, images(), right).x_adv

    on_cosines = FGSM(threat, keep="last")(model.cosines, images(), right).x_adv
    np.testing.assert_allclose(perturbed("ce", "unit"), on_cosines, atol=1e-7)
    assert np.abs(perturbed("ce", "unit") - perturbed("ce", "model")).max() > 1e-4
    np.testing.assert_allclose(perturbed("cw", "unit"), perturbed("cw", "model"), atol=1e-6)


def test_the_adaptive_attack_takes_scale_and_margin_from_the_head():
    model = cosine_model()
    right = model(images()).numpy().argmax(axis=1)
    batch, targets = tf.constant(images()), tf.constant(right)
    cosines = model.cosines(batch).numpy().astype(np.float64)
    for logit_scale, scale in (("model", 15.0), ("unit", 1.0), (4.0, 4.0)):
        victim = Victim(model, logit_scale)
        logits = victim.logits(batch)
        for margin, expected_margin in (("model", 0.2), (0.3, 0.3), (0.0, 0.0)):
            attack = AdaptivePGD(THREAT, margin=margin)
            shifted = scale * (cosines - expected_margin * np.eye(CLASSES)[right])
            expected = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(20), right]
            loss = attack._loss(victim, logits, targets, targets)
            np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    # A head without a margin: plain cross-entropy.
    logits = linear(batch)
    loss = AdaptivePGD(THREAT)._loss(Victim(linear), logits, targets, targets)
    np.testing.assert_array_equal(loss, losses.cross_entropy(logits, targets))


def test_the_margin_alone_turns_no_step():
    """Cross-entropy is a rising function of `sum_k exp(o_k - o_y)`, which the margin only scales.

    Hence an adaptive attack that starts alike ends alike (but for momentum): what makes it stronger
    than the released evaluation is the scale.
    """
    model, threat = cosine_model(), he.ThreatModel("l2", 0.05)
    right = model(images()).numpy().argmax(axis=1)
    settings = {"num_steps": 3, **PARITY}
    adaptive = AdaptivePGD(threat, **settings)(model, images(), right).x_adv
    plain = PGD(threat, **settings)(model, images(), right).x_adv
    np.testing.assert_allclose(adaptive, plain, atol=1e-5)
    released = PGD(threat, logit_scale="unit", **settings)(model, images(), right).x_adv
    assert np.abs(released - plain).max() > 1e-3


# Compilation.


def test_traces_do_not_grow():
    """Calls of the model in Python: one small eager check for each call, and one trace."""
    counts = {}
    for num_steps, batch_size in ((2, 20), (2, 3), (40, 7)):
        model = Counting()
        attack = PGD(THREAT, num_steps, batch_size=batch_size, num_restarts=3)
        attack(model, images(), labels())
        counts[num_steps, batch_size] = model.calls
        for count in (20, 5, 1):
            attack(model, images()[:count], labels()[:count])
        assert model.calls == counts[num_steps, batch_size] + 3
    assert len(set(counts.values())) == 1


def test_a_bound_method_is_compiled_once():
    """`module.logits` is a new object at every access."""
    module = Module()
    calls = []
    module.logits = None
    Recorded = type("Recorded", (), {"logits": lambda self, x: calls.append(1) or linear(x)})
    recorded, attack = Recorded(), BIM(THREAT, 2)
    attack(recorded.logits, images(), labels())
    first = len(calls)
    attack(recorded.logits, images(), labels())
    assert len(calls) == first + 1
    attack(Recorded().logits, images(), labels())
    assert len(calls) == 2 * first + 1


def graph_size(attack):
    signature = (
        tf.TensorSpec([None, 2, 2, 3], tf.float32),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, 2], tf.int32),
    )

    def perturb(batch, targets, seeds):
        return attack.perturb(Victim(linear), batch, targets, seeds)

    graph = tf.function(perturb, input_signature=signature).get_concrete_function().graph
    definition = graph.as_graph_def()
    inner = sum(len(function.node_def) for function in definition.library.function)
    return len(definition.node) + inner


@pytest.mark.parametrize("name", ["bim", "pgd", "mim", "cw-linf", "adaptive-pgd"])
def test_graph_size_does_not_depend_on_the_number_of_steps(name):
    sizes = [graph_size(attacks.get(f"{name}-{steps}", THREAT)) for steps in (2, 10, 500)]
    assert sizes[0] == sizes[1] == sizes[2]


def test_weights_that_changed_between_two_calls_are_used():
    fresh = BIM(THREAT, 3)(lambda batch: -linear(batch), images(), labels())
    for model, variable in (
        (keras_model := functional(), keras_model.layers[-1].kernel),
        ((module := Module()).logits, module.weights),
        (module.compiled_logits, module.weights),
    ):
        attack = BIM(THREAT, 3)
        variable.assign(weights())
        attack(model, images(), labels())
        variable.assign(-weights())
        again = attack(model, images(), labels())
        np.testing.assert_allclose(again.x_adv, fresh.x_adv, atol=1e-6)
        np.testing.assert_array_equal(again.success, fresh.success)


@pytest.mark.parametrize(("setting", "value"), [("scale", 2.0), ("margin", 0.9)])
def test_a_head_whose_scale_or_margin_changed_is_compiled_anew(setting, value):
    model, threat = cosine_model(), he.ThreatModel("l2", 0.05)
    right = model(images()).numpy().argmax(axis=1)
    attack = AdaptivePGD(threat, 2, **PARITY)
    calls = []
    attack.run = lambda *arguments: calls.append(1) or type(attack).run(attack, *arguments)
    before = attack(model, images(), right)
    setattr(model.head, setting, value)
    again = attack(model, images(), right)
    assert len(calls) == 2
    changed = cosine_model(**{setting: value})
    fresh = AdaptivePGD(threat, 2, **PARITY)(changed, images(), right)
    np.testing.assert_allclose(again.x_adv, fresh.x_adv, atol=1e-6)
    if setting == "scale":
        assert np.abs(again.x_adv - before.x_adv).max() > 1e-4


def test_another_model_is_another_compilation():
    attack = BIM(THREAT, 3)
    attack(linear, images(), labels())
    negative = attack(lambda batch: -linear(batch), images(), labels())
    fresh = BIM(THREAT, 3)(lambda batch: -linear(batch), images(), labels())
    np.testing.assert_array_equal(negative.x_adv, fresh.x_adv)


# Inside somebody else's graph.


@pytest.mark.parametrize("name", ["fgsm", "pgd-3", "mim-3"])
def test_perturb_inside_another_function(name):
    attack = attacks.get(name, THREAT, step_size=0.01, stop_when_broken=False, keep="last")
    model, batch = functional(), tf.constant(images())
    targets = tf.constant(labels(), tf.int32)

    @tf.function
    def inside(x, y, seeds):
        return attack.perturb(Victim(model), x, y, seeds)

    each = attack._seeds(np.arange(20), 0)
    expected = attack(model, images(), labels()).x_adv
    np.testing.assert_allclose(inside(batch, targets, each), expected, atol=1e-6)
    for seed in (np.array([0, 7], np.int32), np.array([1, 7], np.int32)):
        x_adv = inside(batch, targets, seed)
        assert x_adv.shape == batch.shape
        assert np.abs(x_adv - batch).max() <= 0.05 + 1e-6
        np.testing.assert_array_equal(inside(batch, targets, seed), x_adv)
    if attack.random_start:
        other = inside(batch, targets, np.array([0, 7], np.int32))
        assert np.mean(np.abs(other - x_adv) > 1e-4) > 0.3
        first_rows = inside(tf.repeat(batch[:1], 20, axis=0), tf.repeat(targets[:1], 20), [0, 7])
        assert np.abs(first_rows[0] - first_rows[1]).max() > 1e-4


def test_perturb_is_constant_for_the_gradient_around_it():
    attack = PGD(THREAT, 2)
    scale = tf.Variable(2.0)

    @tf.function
    def slope(batch, targets):
        with tf.GradientTape() as tape:
            victim = Victim(lambda x: scale * linear(x))
            x_adv = attack.perturb(victim, batch, targets, tf.constant([0, 0]))
            loss = tf.reduce_sum(scale * x_adv)
        return tape.gradient(loss, scale), tf.reduce_sum(x_adv)

    gradient, expected = slope(tf.constant(images()), tf.constant(labels(), tf.int32))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_kl_compares_with_the_clean_prediction():
    """One l2 step from a given start against the gradient `W (p' - p)` in NumPy."""
    batch, start = images(), np.clip(images() + 0.01, 0, 1)
    threat = he.ThreatModel("l2", 10.0)
    attack = PGD(threat, 1, step_size=0.02, loss="kl", keep="last", stop_when_broken=False)
    x_adv = attack.ascend(
        Victim(linear), tf.constant(batch), tf.constant(labels()), tf.constant(start)
    ).x_adv.numpy()

    def prediction(points):
        logits = points.reshape(-1, PIXELS).astype(np.float64) @ weights()
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    gradient = (prediction(start) - prediction(batch)) @ weights().T
    step = 0.02 * gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
    expected = np.clip(start + step.reshape(batch.shape), 0, 1)
    np.testing.assert_allclose(x_adv, expected, atol=1e-5)
