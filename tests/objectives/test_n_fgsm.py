"""N-FGSM against closed forms in NumPy on a linear model, its configuration, passes and saving."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT, examples
from numpy_training import BATCH_SIZE, EPSILON, SEED, SHAPE
from numpy_twins import as_rows, build_twins, check_fit
from small_objectives import CallCounter, build_model, moving_statistics, train_one_step
from small_objectives import examples as small_examples

import he_keras as he
from he_keras.objectives import registry
from he_keras.objectives.n_fgsm import NFGSM


class NumpyNFGSM(closed_form.Trainer):
    noise_ratio, step_size = 2.0, EPSILON

    def noisy(self, x, step):
        noise = tf.random.stateless_uniform([len(x), *SHAPE], [SEED, step], -1.0, 1.0).numpy()
        noise = noise.reshape(len(x), -1).astype(np.float64)
        return np.clip(x + self.noise_ratio * EPSILON * noise, 0.0, 1.0)

    def craft(self, x, labels, step):
        noisy = self.noisy(x, step)
        _, residual = closed_form.cross_entropy(self.head.logits(noisy), labels)
        gradient = self.head.backward(noisy, residual)[1]
        return np.clip(noisy + self.step_size * np.sign(gradient), 0.0, 1.0)


class NumpyOwnSettings(NumpyNFGSM):
    noise_ratio, step_size = 0.7, 0.03


class NumpyWithoutNoise(NumpyNFGSM):
    noise_ratio = 0.0


VARIANTS = {
    "default": (NumpyNFGSM, lambda: NFGSM(THREAT)),
    "own settings": (NumpyOwnSettings, lambda: NFGSM(THREAT, noise_ratio=0.7, step_size=0.03)),
    "no noise": (NumpyWithoutNoise, lambda: NFGSM(THREAT, noise_ratio=0)),
}
GRID = [("default", head) for head in HEADS] + [("own settings", "he"), ("no noise", "linear")]


def build(variant, head_name):
    """A Keras model and its NumPy twin with the same weights."""
    trainer, make_objective = VARIANTS[variant]
    return build_twins(trainer, make_objective(), head_name)


@pytest.mark.parametrize(("variant", "head"), GRID)
def test_weights_after_fit_match_the_closed_form(variant, head):
    model, expected = build(variant, head)
    check_fit(model, expected, head == "he")


@pytest.mark.parametrize(("variant", "head"), GRID)
def test_crafted_examples_match_the_closed_form(variant, head):
    model, expected = build(variant, head)
    x, y = (part[:BATCH_SIZE] for part in examples())
    x_adv = model.objective.craft(model, tf.constant(x), tf.constant(y), (SEED, 0)).numpy()
    np.testing.assert_allclose(as_rows(x_adv), expected.craft(as_rows(x), y, 0), atol=1e-6)


def test_examples_leave_the_ball_but_not_the_bounds():
    """Guards the closed forms above: with a projection, or without the clips, they would differ."""
    model, expected = build("default", "linear")
    x, y = (part[:BATCH_SIZE] for part in examples())
    x_adv = model.objective.craft(model, tf.constant(x), tf.constant(y), (SEED, 0)).numpy()
    change = np.abs(x_adv - x)
    assert 1.5 * EPSILON < change.max() <= 3 * EPSILON + 1e-6
    assert 0.0 <= x_adv.min() and x_adv.max() <= 1.0
    noisy = expected.noisy(as_rows(x), 0)
    assert np.isin(noisy, (0.0, 1.0)).any()  # clipped after the noise
    assert (np.isin(x_adv, (0.0, 1.0)) & ~np.isin(noisy, (0.0, 1.0)).reshape(x.shape)).any()


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_other_norms_use_their_own_ball_and_step(norm):
    threat = he.ThreatModel(norm, 0.4, bounds=(-9.0, 9.0))
    model, _ = build("default", "linear")
    images, labels = (tf.constant(part[:BATCH_SIZE]) for part in examples())
    noisy = threat.random_start(images, (4, 1), 1.2)
    with tf.GradientTape() as tape:
        tape.watch(noisy)
        loss = he.losses.cross_entropy(model(noisy, training=False), labels)
    step = as_rows(tape.gradient(loss, noisy).numpy())
    if norm == "l2":
        step /= np.linalg.norm(step, axis=1, keepdims=True)
    else:
        step = np.where(np.abs(step) == np.abs(step).max(axis=1, keepdims=True), np.sign(step), 0)
    x_adv = NFGSM(threat, noise_ratio=3.0).craft(model, images, labels, (4, 1))
    np.testing.assert_allclose(as_rows((x_adv - noisy).numpy()), 0.4 * step, atol=1e-5)
    assert threat.distance(x_adv, images).numpy().max() > 0.8


def test_crafting_is_reproducible_and_independent_of_the_margin():
    images, labels = map(tf.constant, small_examples())
    crafted = {}
    weights = build_model(NFGSM(THREAT)).get_weights()
    for margin in (0.0, 0.3):
        model = build_model(NFGSM(THREAT), he.CosineHead(4, scale=5.0, margin=margin))
        model.set_weights(weights)
        for seed in (1, 2):
            crafted[margin, seed] = model.objective.craft(model, images, labels, (4, seed)).numpy()
    np.testing.assert_array_equal(crafted[0.0, 1], crafted[0.3, 1])
    assert not np.array_equal(crafted[0.0, 1], crafted[0.0, 2])


def test_no_gradient_flows_through_the_crafted_examples():
    model = build_model(NFGSM(THREAT))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model.objective.craft(model, *map(tf.constant, small_examples())))
    assert all(each is None for each in tape.gradient(total, model.trainable_variables))


@pytest.mark.parametrize("in_training_mode", [False, True])
def test_passes_and_batch_norm_statistics(in_training_mode):
    images, labels = small_examples()
    counter = CallCounter()
    objective = NFGSM(THREAT, attack_training_mode=in_training_mode)
    model = build_model(objective, counter=counter)
    # The seed of a model's first step is (0, 0).
    noisy = THREAT.random_start(tf.constant(images), (0, 0), 2 * EPSILON)
    twin = build_model(NFGSM(THREAT, attack_training_mode=in_training_mode))
    twin.set_weights(model.get_weights())
    x_adv = twin.objective.craft(twin, tf.constant(images), tf.constant(labels))
    expected = np.stack([np.zeros(9), np.ones(9)])
    for batch in ([noisy] if in_training_mode else []) + [x_adv]:
        rows = as_rows(batch.numpy())
        expected = 0.9 * expected + 0.1 * np.stack([rows.mean(axis=0), rows.var(axis=0)])
    counter.flags.clear()
    train_one_step(model, images, labels, run_eagerly=True)
    assert counter.flags == [in_training_mode, True]
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    passes = ("attack", "adversarial") if in_training_mode else ("adversarial",)
    assert model.objective.batch_norm_passes == passes


def test_configuration_is_plain_data_and_comes_back():
    objective = NFGSM(he.ThreatModel("l2", 0.5, bounds=(-1, 1)), 1, "1/4", True)
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert restored.threat == objective.threat
    assert (restored.noise_ratio, restored.step_size) == (1.0, 0.25)
    assert restored.attack_training_mode is True
    assert restored.batch_norm_passes == ("attack", "adversarial")


def test_registered_with_the_settings_of_the_paper():
    objective = registry.get("n_fgsm", he.ThreatModel("linf", "8/255"))
    assert type(objective) is NFGSM
    assert objective.noise_ratio == 2.0
    assert objective.step_size == pytest.approx(8 / 255)
    assert objective.attack_training_mode is False


@pytest.mark.parametrize(
    ("build_objective", "error", "message"),
    [
        (lambda: NFGSM(None), ValueError, "expected a ThreatModel; received None"),
        (lambda: NFGSM(0.03), TypeError, "expected a ThreatModel; received threat=0.03"),
        (lambda: NFGSM(THREAT, noise_ratio=-1), ValueError, ">= 0.0; received noise_ratio=-1"),
        (
            lambda: NFGSM(THREAT, noise_ratio="2"),
            ValueError,
            "expected .* received noise_ratio='2'",
        ),
        (lambda: NFGSM(THREAT, step_size=0.0), ValueError, "expected .* > 0; received step_size=0"),
        (lambda: NFGSM(THREAT, step_size="x"), ValueError, "expected .* received value='x'"),
        (
            lambda: NFGSM(THREAT, attack_training_mode=1),
            TypeError,
            "expected True or False; received attack_training_mode=1",
        ),
    ],
)
def test_wrong_arguments_are_refused(build_objective, error, message):
    with pytest.raises(error, match=message):
        build_objective()
