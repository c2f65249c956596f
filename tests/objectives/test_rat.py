"""RAT against the stored references, closed forms in NumPy and finite differences."""

import golden_models
import keras
import numpy as np
import numpy_training as closed_form
import pytest
import rat_reference as reference
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT
from golden_training import TOLERANCES, assert_close, loss_and_gradients
from numpy_training import NUM_STEPS, STEP_SIZE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras import objectives
from he_keras.objectives.objective import Objective, TrainingStep
from he_keras.objectives.rat import RAT, divergence_from, row_sums, soft_labels

STORED = {"rat_released": "released", "rat_bugfixed": "symmetric"}


# Stored references


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rat_released", "float32"),
        ("rat_released", "float64"),
        ("rat_bugfixed", "float64"),
        pytest.param("rat_bugfixed", "float32", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_match_the_stored_ones(name, dtype):
    keras.config.set_dtype_policy(dtype)
    objective = RAT(base=objectives.TRADES(THREAT, beta=6.0), mode=STORED[name])
    stored = golden_models.arrays("train_linear")
    loss, gradients = loss_and_gradients("linear", None, objective)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(loss, stored[f"{name}/loss"], rtol=tolerance)
    for array, gradient in gradients.items():
        length = np.linalg.norm(gradient)
        np.testing.assert_allclose(length, stored[f"{name}/gradnorm/{array}"], rtol=tolerance)
        if f"{name}/grad/{array}" in stored:
            assert_close(gradient, stored[f"{name}/grad/{array}"], tolerance)


@pytest.mark.parametrize("name", STORED)
def test_soft_labels_match_the_stored_ones(name):
    stored = golden_models.arrays("train_linear")
    gaps = [
        stored[f"{name}/tl{order}_natural"] - stored[f"{name}/tl{order}_adv"] for order in (1, 2)
    ]
    second = gaps[1] if name == "rat_bugfixed" else -gaps[1]
    expected = {"y1": gaps[0], "y2": -gaps[0], "yy1": second, "yy2": -gaps[1]}
    for key, gap in expected.items():
        ours = soft_labels(tf.constant(gap), stored["y"], 0.8)
        np.testing.assert_allclose(ours, stored[f"{name}/{key}"], rtol=1e-9, atol=1e-12)


def test_the_derivatives_match_the_stored_ones():
    keras.config.set_dtype_policy("float64")
    stored = golden_models.arrays("train_linear")
    model = golden_models.adversarial_model("linear")
    images = {"natural": stored["x_uint8"] / np.float32(255), "adv": stored["x_adv"]}
    for name, batch in images.items():
        logits = model(tf.constant(batch)).numpy()
        residual = np.exp(closed_form.log_softmax(logits)) - np.eye(10)[stored["y"]]
        features = model.features(tf.constant(batch))
        sums = row_sums(model.head, features, tf.constant(residual / 8))
        expected = stored[f"rat_released/tl1_{name}"]
        np.testing.assert_allclose(np.abs(sums), expected, rtol=1e-9)


# Closed forms


def iterated(build, **options):
    return build(THREAT, num_steps=NUM_STEPS, step_size=STEP_SIZE, **options)


VARIANTS = {
    "trades": (reference.TRADES, lambda: RAT(base=iterated(objectives.TRADES))),
    "symmetric": (
        reference.SymmetricTRADES,
        lambda: RAT(
            base=iterated(objectives.TRADES),
            mode="symmetric",
            alpha=0.4,
            second_order_ratio=0.8,
            label_share=0.9,
        ),
    ),
    "pgd_at": (reference.PGDAT, lambda: RAT(base=iterated(objectives.PGDAT))),
}
GRID = [("trades", head) for head in HEADS] + [("symmetric", "he"), ("pgd_at", "linear")]
GRID += [("pgd_at", "m-he")]


def build(variant, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    trainer, make_objective = VARIANTS[variant]
    return build_twins(trainer, make_objective(), head_name)


@pytest.mark.parametrize(("variant", "head"), GRID)
def test_weights_after_fit_match_the_closed_form(variant, head):
    model, expected = build(variant, head)
    history = check_fit(model, expected, (variant, head) == ("trades", "he"))
    assert "clean_accuracy" in history


@pytest.mark.parametrize("mode", ["released", "symmetric"])
@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_losses_for_any_number_of_classes(classes, mode):
    generator = np.random.default_rng(classes)
    x, x_adv = generator.normal(0.0, 1.0, (2, 12, 5))
    labels = generator.integers(0, classes, 12)
    kernel = generator.normal(0.0, 1.0, (5, classes))
    network = keras.Sequential([keras.Input((5,)), keras.layers.Identity()])
    model = he.HEAdversarialModel(network, keras.layers.Dense(classes), None, None)
    model.head.set_weights([kernel, np.zeros(classes)])
    objective = RAT(base=objectives.TRADES(THREAT, beta=2.0), mode=mode)
    ours = objective.loss(model, x.astype("f"), labels, x_adv.astype("f")).numpy()
    clean, adversarial = x @ kernel, x_adv @ kernel
    sums, plain = [], []
    for z, logits in ((x, clean), (x_adv, adversarial)):
        log_p = closed_form.log_softmax(logits)
        plain.append(-log_p[np.arange(12), labels])
        sums.append((z.T @ (np.exp(log_p) - np.eye(classes)[labels])).sum(axis=0))
    share = {2: 0.0, 3: 1 / 3, 10: 0.8, 100: 0.98}[classes]
    (first, second), _ = reference.taylor_terms(*sums, clean, adversarial, labels, share, mode)
    kl = closed_form.kl_divergence(clean, adversarial)[0]
    expected = 0.8 * plain[0] + 0.2 * first + 0.1 * second + 2.0 * kl
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_gradients_match_finite_differences():
    """Along random directions of all weights, where the soft labels are kept: they are constant."""
    keras.config.set_dtype_policy("float64")
    network = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3, "tanh")]
    )
    model = he.HEAdversarialModel(network, he.CosineHead(4, scale=3.0), None, None)
    generator = np.random.default_rng(2)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(0.0, 0.7, variable.shape))
    x, x_adv = generator.uniform(0.0, 1.0, (2, 6, 4))
    labels = np.array([0, 1, 2, 3, 0, 1])
    objective = RAT(base=objectives.TRADES(THREAT, beta=1.5), mode="symmetric", alpha=0.5)
    images, x_adv = tf.constant(x), tf.constant(x_adv)
    fixed = [
        objective._row_sums(model, labels, recorded, None)
        for recorded in _recorded(model, images, x_adv)
    ]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(objective.loss(model, images, labels, x_adv))
    gradients = tape.gradient(loss, model.trainable_variables)
    objective._row_sums = lambda model, labels, recorded, weight: fixed.pop(0)
    weights = model.get_weights()

    def loss_at(direction, size):
        model.set_weights([w + size * d for w, d in zip(weights, direction, strict=True)])
        fixed[:] = [a, b]
        return float(tf.reduce_sum(objective.loss(model, images, labels, x_adv)))

    a, b = fixed
    for _ in range(3):
        direction = [generator.normal(0.0, 1.0, weight.shape) for weight in weights]
        slope = (loss_at(direction, 1e-5) - loss_at(direction, -1e-5)) / 2e-5
        expected = sum(np.sum(g.numpy() * d) for g, d in zip(gradients, direction, strict=True))
        assert slope == pytest.approx(expected, rel=1e-7)


def _recorded(model, *batches):
    from he_keras.objectives.rat import _Recorder

    recorder = _Recorder(model)
    for batch in batches:
        recorder(batch, training=True)
    return recorder.passes


# Soft labels and statistics


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_rows_sum_to_one_and_keep_the_share_of_the_true_class(classes):
    gap = np.random.default_rng(0).normal(0.0, 1e-9, classes).astype(np.float32)
    rows = soft_labels(tf.constant(gap), np.arange(classes), 0.7).numpy()
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.diag(rows), 0.3, rtol=1e-5)
    np.testing.assert_allclose(rows, reference.soft_label_matrix(gap, 0.7), atol=1e-6)


@pytest.mark.parametrize("gap", [[0.0, 0.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
def test_degenerate_rows_share_equally(gap):
    """All mass on one class leaves that class's row without any; equal gaps leave none at all."""
    rows = soft_labels(tf.constant(gap), np.arange(4), 0.6).numpy()
    np.testing.assert_allclose(rows[2], [0.2, 0.2, 0.4, 0.2], rtol=1e-6)
    if gap[2] == 5.0:
        np.testing.assert_allclose(rows[0], [0.4, 0.0, 0.6, 0.0], rtol=1e-6)
    logits = tf.Variable(tf.zeros([4, 4]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(divergence_from(tf.constant(rows), logits))
    assert np.isfinite(loss) and np.isfinite(tape.gradient(loss, logits)).all()


@pytest.mark.parametrize(
    ("angle", "feature_norm"), [("cosine", True), ("cosine", False), ("arc", True)]
)
def test_a_longer_class_vector_changes_nothing(angle, feature_norm):
    """The logits of a cosine head do not depend on it; nor do the terms."""
    head = he.CosineHead(4, scale=5.0, angle=angle, feature_norm=feature_norm)
    model = build_model(RAT(THREAT), head, batch_norm=False)
    images, labels = small_examples()
    x_adv = np.clip(images + 0.1, 0.0, 1.0)
    before = model.objective.loss(model, images, labels, x_adv).numpy()
    model.head.set_weights([model.head.get_weights()[0] * np.array([3.0, 1.0, 0.2, 9.0])])
    after = model.objective.loss(model, images, labels, x_adv).numpy()
    np.testing.assert_allclose(after, before, rtol=1e-4)


def test_without_weight_norm_the_derivative_is_that_by_the_kernel():
    head = he.CosineHead(3, scale=2.0, weight_norm=False)
    head.build((None, 4))
    generator = np.random.default_rng(0)
    features, residual = generator.normal(0.0, 1.0, (5, 4)), generator.normal(0.0, 1.0, (5, 3))
    sums = row_sums(head, tf.constant(features, tf.float32), tf.constant(residual, tf.float32))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(sums, 2.0 * (unit.T @ residual).sum(axis=0), rtol=1e-4)


def test_examples_of_weight_zero_have_no_part_in_the_statistics():
    model = build_model(RAT(THREAT), batch_norm=False)
    images, labels = small_examples()
    x_adv = np.clip(images + 0.1, 0.0, 1.0)
    weight = tf.constant([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    weighted = model.objective.forward_in_step(
        model, images, labels, x_adv, TrainingStep(sample_weight=weight)
    ).losses
    fewer = model.objective.loss(model, images[:4], labels[:4], x_adv[:4])
    np.testing.assert_allclose(weighted[:4], fewer, rtol=1e-5)
    assert not np.allclose(model.objective.loss(model, images, labels, x_adv)[:4], fewer, rtol=1e-4)


# Passes


TWO = ("clean", "adversarial")
REPEATED = (*TWO, "adversarial", "clean", "adversarial", "clean", "adversarial", "clean")


@pytest.mark.parametrize(
    ("base", "repeat_passes", "attack", "passes"),
    [("trades", False, 4, TWO), ("trades", True, 4, REPEATED), ("pgd_at", False, 3, TWO)],
)
def test_passes_and_batch_norm_statistics(base, repeat_passes, attack, passes):
    """The released order is clean, adv, adv, clean, adv, clean, adv, clean."""
    images, labels = small_examples()
    objective = RAT(THREAT, base, num_steps=3, repeat_passes=repeat_passes)
    counter = CallCounter()
    model, twin = build_model(objective, counter=counter), build_model(objective)
    twin.set_weights(model.get_weights())
    x_adv = objective.craft(twin, tf.constant(images), tf.constant(labels)).numpy()
    inputs = {"clean": images, "adversarial": x_adv}
    expected = np.stack([np.zeros(9), np.ones(9)])
    for each in passes:
        rows = as_rows(inputs[each])
        expected = 0.9 * expected + 0.1 * np.stack([rows.mean(axis=0), rows.var(axis=0)])
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert counter.flags == [False] * attack + [True] * len(passes)
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    assert objective.batch_norm_passes == passes


def test_an_adversary_in_training_mode_leaves_no_statistics():
    objective = RAT(THREAT, "fast_at", attack_training_mode=True)
    assert objective.batch_norm_passes == ("clean", "adversarial")
    model = build_model(objective)
    before = model.get_weights()
    objective.craft(model, *map(tf.constant, small_examples()))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_inference_mode_changes_no_statistic():
    model = build_model(RAT(THREAT, repeat_passes=True))
    images, labels = small_examples()
    before = model.get_weights()
    model.objective.loss(model, images, labels, images, training=False)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


# Arguments


class OwnLoss(Objective):
    def forward(self, model, images, labels, x_adv, training=True):
        return super().forward(model, images, labels, images, training)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"base": "mart"}, ValueError, "expected TRADES.*received base=MART"),
        ({"base": "standard"}, ValueError, "received base=Standard"),
        ({"base": "free_at"}, ValueError, "carries state from one update.*base=FreeAT"),
        ({"base": OwnLoss(THREAT)}, ValueError, "received base=OwnLoss"),
        ({"mode": "fixed"}, ValueError, "expected one of .*mode='fixed'"),
        ({"alpha": 1.5}, ValueError, r"expected a number in \[0, 1\]; received alpha=1.5"),
        ({"alpha": "0.2"}, ValueError, "received alpha='0.2'"),
        ({"label_share": -0.1}, ValueError, "received label_share=-0.1"),
        ({"second_order_ratio": -1.0}, ValueError, "received second_order_ratio=-1.0"),
        ({"weight_noise": float("nan")}, ValueError, "received weight_noise=nan"),
        ({"repeat_passes": 1}, TypeError, "received repeat_passes=1"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        RAT(THREAT, **options)


def test_a_head_without_kernel_is_refused():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = he.HEAdversarialModel(network, keras.layers.Activation("linear"), RAT(THREAT), None)
    with pytest.raises(ValueError, match=r"expected a layer with a kernel.*received Activation"):
        model.objective.loss(model, np.ones((2, 4), "f"), np.array([0, 1]), np.ones((2, 4), "f"))
