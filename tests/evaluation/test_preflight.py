"""Checks before the attacks: what each fires on, and that none fires on an honest model."""

import pathlib
import re

import broken_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from broken_models import HONEST, MUST_FIRE, THREAT, checks, honest, sample

import he_keras as he
from he_keras.attacks import Victim
from he_keras.evaluation.checks import preflight
from he_keras.evaluation.checks.check import Check, CleanSample
from he_keras.evaluation.checks.table import CHECKS, run_check
from he_keras.precision import change_by_rounding

pytestmark = pytest.mark.usefixtures("op_by_op")

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md"
BEFORE = [
    "finite",
    "logits",
    "deterministic",
    "batch-independence",
    "frozen-state",
    "differentiable",
    "zero-gradients",
    "gradient-direction",
    "noisy-loss-surface",
    "input-range",
    "epsilon-units",
    "clean-accuracy",
    "label-order",
    "enough-classes",
]


def verdicts(model, images, labels, threat=THREAT, **options):
    return {check.name: check for check in preflight(model, images, labels, threat, **options)}


def fired(model, images, labels, threat=THREAT):
    return {name for name, each in verdicts(model, images, labels, threat).items() if each.fired}


def linear_logits(images):
    return 20.0 * tf.reshape(images, [-1, 12])[:, :4]


def linear_sample(count=64, high=1.0):
    images = np.random.default_rng(0).uniform(size=(count, 2, 2, 3)) * high
    return images.astype(np.float32), images.reshape(count, -1)[:, :4].argmax(axis=1)


@pytest.mark.fast_cases("honest-0", "honest_cosine-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HONEST)
def test_no_check_fires_on_an_honest_model(name, seed):
    found = checks(name, seed, after=False)
    assert [check.name for check in found] == BEFORE
    assert {check.verdict for check in found} == {"pass"}
    assert {check.when for check in found} == {"before"}


@pytest.mark.parametrize("name", MUST_FIRE)
def test_the_checks_fire_on_a_broken_model(name):
    found = {check.name for check in checks(name, after=False) if check.fired}
    assert found >= MUST_FIRE[name] & set(BEFORE)
    if name not in ("quantised_input", "noise_layer", "stochastic_activation"):
        assert found == MUST_FIRE[name] & set(BEFORE)


def test_a_random_model_leaves_open_what_cannot_be_decided():
    found = {check.name: check.verdict for check in checks("noise_layer", after=False)}
    assert found["batch-independence"] == found["gradient-direction"] == "skipped"


def test_a_little_randomness_is_a_warning():
    generator = tf.random.Generator.from_seed(0)

    def logits(images):
        return linear_logits(images) + 0.01 * generator.normal([4])

    found = verdicts(logits, *linear_sample())["deterministic"]
    assert found.verdict == "warn" and "autoattack-rand" in found.message


def test_answers_that_are_not_finite():
    images, labels = linear_sample()
    model = lambda batch: linear_logits(batch) / tf.cast(batch[:, 0, 0, :1] > 0.5, tf.float32)  # noqa: E731
    found = verdicts(model, images, labels)["finite"]
    bad = int((images[:, 0, 0, 0] <= 0.5).sum())
    assert (found.verdict, found.figure) == ("fail", f"{bad} of 64 images")


def test_log_probabilities_and_cosines_are_logits():
    images, labels = linear_sample()
    assert "logits" not in fired(lambda x: tf.nn.log_softmax(linear_logits(x)), images, labels)
    assert "logits" not in fired(lambda x: linear_logits(x) / 20.0, images, labels)
    assert "logits" in fired(lambda x: tf.nn.softmax(linear_logits(x)), images, labels)


def test_probabilities_are_found_at_any_scale():
    softmax = keras.Sequential([honest(), keras.layers.Softmax()])
    found = verdicts(softmax, *sample(), logit_scale=10.0)
    assert found["logits"].verdict == "fail"


def test_a_model_that_counts_its_calls_changes():
    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, images):
            self.calls.assign_add(1.0)
            return linear_logits(images)

    images, labels = linear_sample()
    assert fired(Counting(), images, labels) == {"frozen-state"}


def test_the_state_of_a_random_generator_may_change():
    inputs = keras.Input((2, 2, 3))
    dropped = keras.layers.Dropout(0.5)(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4)(dropped))
    images = linear_sample()[0]
    labels = model(images, training=False).numpy().argmax(axis=1)
    assert "frozen-state" not in fired(lambda x: model(x, training=True), images, labels)


def test_code_without_gradient():
    def logits(images):
        return tf.numpy_function(lambda x: 20.0 * x.reshape(-1, 12)[:, :4], [images], tf.float32)

    found = verdicts(logits, *linear_sample())
    assert found["differentiable"].verdict == "fail"
    assert found["zero-gradients"].verdict == "skipped"


def test_gradients_that_are_not_finite():
    def logits(images):
        return linear_logits(images) + tf.sqrt(0.0 * images[:, 0, 0, :1])

    assert verdicts(logits, *linear_sample())["differentiable"].verdict == "fail"


def test_a_gradient_of_the_wrong_sign():
    @tf.custom_gradient
    def reversed_gradient(images):
        return images, lambda upstream: -upstream

    model = lambda x: linear_logits(reversed_gradient(x))  # noqa: E731
    assert fired(model, *linear_sample()) == {"gradient-direction"}


def test_images_of_0_to_1_in_bounds_of_0_to_255():
    images, labels = linear_sample()
    threat = he.ThreatModel("linf", 8.0, bounds=(0, 255))
    assert "input-range" in fired(linear_logits, images, labels, threat)
    pixels, labels = linear_sample(high=255.0)
    assert not fired(lambda x: linear_logits(x / 255.0), pixels, labels, threat)


@pytest.mark.parametrize(
    ("norm", "epsilon", "verdict"),
    [
        ("linf", 0.5, "fail"),
        ("linf", 8 / 255, "pass"),
        ("linf", 8 / 255 / 255, "warn"),
        ("l2", 3.0, "fail"),
        ("l2", 0.5, "pass"),
        ("l2", 0.001, "warn"),
        ("l1", 9.0, "fail"),
        ("l1", 0.5, "pass"),
        ("l1", 0.0001, "warn"),
    ],
)
def test_units_of_epsilon(norm, epsilon, verdict):
    found = verdicts(linear_logits, *linear_sample(), he.ThreatModel(norm, epsilon))
    assert found["epsilon-units"].verdict == verdict


@pytest.mark.parametrize(
    ("expected", "convert", "target"),
    [
        ("0..255", lambda x: 255.0 * x, 128.0),
        ("-1..1", lambda x: 2.0 * x - 1.0, 0.5),
        ("normalised", lambda x: (x - 0.5) / 0.29, -0.5),
        ("dark", lambda x: 1.0 - x, 0.25),
    ],
)
def test_the_preprocessing_that_is_missing_is_named(expected, convert, target):
    """The class is that of the pixel which, after the conversion, comes nearest to the target."""
    images = linear_sample(128)[0]
    nearest = np.abs(convert(images) - target).reshape(128, 12).argmin(axis=1)

    def logits(batch):
        return -tf.abs(tf.reshape(batch, [-1, 12]) - target)

    found = verdicts(logits, images, nearest)["clean-accuracy"]
    assert found.verdict == "fail" and expected in found.message


def test_reversed_channels_are_named():
    mixing = np.random.default_rng(4).normal(size=(12, 6)).astype(np.float32)
    images = linear_sample(128)[0]
    labels = ((images[..., ::-1].reshape(128, 12) - 0.5) @ mixing).argmax(axis=1)
    found = verdicts(lambda x: (tf.reshape(x, [-1, 12]) - 0.5) @ mixing, images, labels)
    assert "BGR" in found["clean-accuracy"].message


def test_a_model_at_chance():
    random = np.random.default_rng(1)
    images, labels = (
        random.uniform(size=(128, 2, 2, 3)).astype(np.float32),
        random.integers(4, size=128),
    )
    found = verdicts(linear_logits, images, labels)
    assert found["clean-accuracy"].verdict == "warn"
    assert found["label-order"].verdict == "pass"
    assert verdicts(linear_logits, images[:5], labels[:5])["clean-accuracy"].verdict == "skipped"


def test_labels_that_start_at_1():
    """Too many classes to learn an order from the sample, but a shift shows at once."""
    images = np.random.default_rng(2).uniform(size=(64, 100)).astype(np.float32)
    labels = (images.argmax(axis=1) + 1) % 100
    found = verdicts(lambda x: 20.0 * x, images, labels)["label-order"]
    assert found.verdict == "fail" and "shifted by -1" in found.message


@pytest.mark.parametrize(("classes", "verdict"), [(2, "warn"), (3, "warn"), (4, "pass")])
def test_too_few_classes_for_dlr(classes, verdict):
    images = linear_sample()[0]
    labels = images.reshape(64, -1)[:, :classes].argmax(axis=1)
    found = verdicts(lambda x: linear_logits(x)[:, :classes], images, labels)["enough-classes"]
    assert (found.verdict, found.figure) == (verdict, f"{classes} classes")


@pytest.mark.parametrize(
    ("model", "images", "labels", "message"),
    [
        (linear_logits, linear_sample()[0] * 2.0, linear_sample()[1], "bounds"),
        (linear_logits, linear_sample()[0], linear_sample()[1] + 9, "Label outside"),
        (lambda x: x, *linear_sample(), "Not a classifier"),
        (linear_logits, linear_sample()[0][:0], linear_sample()[1][:0], "No examples"),
    ],
)
def test_bad_arguments_are_refused(model, images, labels, message):
    with pytest.raises(ValueError, match=message):
        preflight(model, images, labels, THREAT)


def half_precision(images):
    """A linear model of random weights, computed in bfloat16 inside a function."""
    features, weights = (tf.cast(each, tf.bfloat16) for each in random_layer(images))
    return tf.cast(features @ weights, tf.float32)


def tensor_float_32(images):
    """The same with the mantissas of both factors rounded to ten bits, as a graphics card does."""
    features, weights = random_layer(images)
    return ten_bits(features) @ ten_bits(weights)


def random_layer(images):
    """Features of many different values, of which some lie where rounding turns, and weights."""
    random = np.random.default_rng(0)
    scales = random.uniform(0.3, 1.0, 64).astype(np.float32)
    weights = random.normal(size=(64, 10)).astype(np.float32)
    return tf.reshape(images, [-1, 64]) * scales, tf.constant(weights)


def ten_bits(values):
    bits = tf.bitcast(tf.stop_gradient(values), tf.int32)
    rounded = tf.bitcast(tf.bitwise.bitwise_and(bits + 0x1000, ~0x1FFF), tf.float32)
    return values + tf.stop_gradient(rounded - values)


def other_order(model):
    """Numbers that are added up in another order each time: their last digits differ."""
    generator = tf.random.Generator.from_seed(0)
    return lambda images: model(images * (1 + 3e-5 * generator.normal(tf.shape(images))))


def noisy(model, size):
    """A model that is random: the logits move by that share of their size."""
    generator = tf.random.Generator.from_seed(0)

    def logits(images):
        answers = model(images)
        return answers + size * tf.norm(answers, axis=1, keepdims=True) * generator.normal([10])

    return logits


def first_change(figure):
    return float(figure.split()[2].rstrip(","))


def labelled(model):
    images = sample()[0]
    return images, np.argmax(model(tf.constant(images)), axis=1)


@pytest.fixture
def with_graphics_card(monkeypatch):
    """TensorFlow says that there is one, which multiplies matrices in TensorFloat-32."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["it"] * (kind == "GPU"))


@pytest.mark.usefixtures("with_graphics_card")
@pytest.mark.parametrize("model", [half_precision, tensor_float_32])
def test_rounding_in_another_order_is_not_randomness(model):
    found = verdicts(other_order(model), *labelled(model))
    assert first_change(found["deterministic"].figure) > 1e-4
    assert found["deterministic"].verdict == "pass"
    assert found["batch-independence"].verdict == "pass"


@pytest.mark.usefixtures("with_graphics_card")
@pytest.mark.parametrize(("model", "size"), [(half_precision, 0.05), (tensor_float_32, 0.01)])
def test_randomness_is_found_in_every_precision(model, size):
    assert "deterministic" in fired(noisy(model, size), *labelled(model))


def test_float32_has_float32s_tolerance():
    """Without a card that rounds, the same changes are no rounding."""
    model = tensor_float_32
    assert "deterministic" in fired(other_order(model), *labelled(model))
    assert "deterministic" in fired(noisy(model, 1e-3), *labelled(model))


def in_batches(model, shift):
    """Another order for each size, and what `shift` adds to the logits of single images."""

    def logits(images):
        size = tf.cast(tf.shape(images)[0], tf.float32)
        is_alone = tf.cast(size == 1, tf.float32)
        answers = model(images * (1 + 1e-5 * tf.sin(size)))
        return answers * (1.0 + shift * is_alone * tf.range(10.0) / 9)

    return logits


@pytest.mark.parametrize("model", [half_precision, tensor_float_32])
def test_other_batches_may_round_differently_and_no_more(model):
    """Also where nothing declares the precision: it is measured on the images."""
    found = verdicts(in_batches(model, 0.0), *labelled(model))["batch-independence"]
    assert found.verdict == "pass" and first_change(found.figure) > 1e-4
    assert "batch-independence" in fired(in_batches(model, 0.2), *labelled(model))


def test_keras_layers_declare_their_precision():
    images = tf.constant(sample()[0])
    assert change_by_rounding(Victim(honest()), images) == 1e-4
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs)))
    assert change_by_rounding(Victim(model), images) == 8 * 2**-8


def test_a_check_knows_its_words():
    with pytest.raises(ValueError, match="verdict"):
        Check("a", "before", "good", "", "")
    with pytest.raises(ValueError, match="when"):
        Check("a", "later", "pass", "", "")
    assert (
        Check("a", "before", "warn", "", "").fired
        and not Check("a", "after", "skipped", "", "").fired
    )


def test_the_table_and_the_documentation_name_the_same_checks_in_the_same_order():
    names = [row.name for row in CHECKS]
    before = [row.name for row in CHECKS if row.when == "before"]
    assert names[: len(before)] == before == BEFORE
    sections = re.findall(r"^### ([a-z]+(?:-[a-z]+)*)$", DOCS.read_text(), re.MULTILINE)
    assert sections == names


def test_a_check_of_ones_own_is_a_function_and_a_row():
    """The example of the documentation, on images of which one occurs twice, and on others."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "def distinct_images" in block)
    found: dict = {}
    exec(code, found)
    images, labels = linear_sample()
    check = run_check(found["row"], CleanSample(linear_logits, images, labels, THREAT))
    assert (check.name, check.when, check.verdict) == ("distinct-images", "before", "pass")
    images[3], labels[3] = images[5], labels[5]
    check = run_check(found["row"], CleanSample(linear_logits, images, labels, THREAT))
    assert (check.verdict, check.figure) == ("fail", "1 of 64 images")


def test_the_zoo_holds_every_model_that_it_names():
    assert all(hasattr(broken_models, name) for name in (*HONEST, *MUST_FIRE))
