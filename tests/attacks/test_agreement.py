"""The path that is attacked is compared with the model itself; faults are planted to see it."""

import keras
import model_zoo
import numpy as np
import pytest
import small_limits
import tensorflow as tf

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.framework.agreement import agreed, probe, standing_still
from he_keras.cpu import folded_network
from he_keras.cpu.comparison import is_trusted
from he_keras.precision import difference_by_rounding, largest_difference

THREAT = he.ThreatModel("linf", 0.05)
FAULT = "the faster path answers differently from the model (by up to "


@pytest.fixture
def wrong_folding(monkeypatch):
    """Folds a batch norm with a wrong shift."""
    right = folded_network.inference_scale_and_shift

    def wrong(norm):
        scale, shift = right(norm)
        return scale, shift + 0.3

    monkeypatch.setattr(folded_network, "inference_scale_and_shift", wrong)


def attacked(model, **options):
    images = model_zoo.images().numpy()
    attack = he.attacks.PGD(THREAT, 2, stop_when_broken=False, **options)
    return attack(model, images, np.zeros(6, int))


def test_a_wrong_short_cut_is_not_taken_and_reported(wrong_folding):
    model, images = model_zoo.model_of("functional"), model_zoo.images()
    right = model.plain_logits(images).numpy()
    for wrong in (model(images, training=False), model.predict(images, verbose=0)):
        assert np.abs(wrong - right).max() > 0.01
    result = attacked(model)
    assert len(result.warnings) == 1 and FAULT in result.warnings[0]
    margins = he.losses.margin(model.plain_logits(result.x_adv), np.zeros(6, int))
    np.testing.assert_allclose(result.margin, margins, atol=1e-6)
    # From here on the model is one function everywhere.
    for answer in (model(images, training=False), model.predict(images, verbose=0)):
        np.testing.assert_allclose(answer, right, atol=1e-6)
    assert attacked(model).warnings == result.warnings


def test_the_report_of_an_evaluation_says_so(wrong_folding):
    model, images = model_zoo.model_of("functional"), model_zoo.images().numpy()
    labels = np.asarray(model.plain_logits(images)).argmax(axis=1)
    report = he.evaluate_robustness(model, (images, labels), THREAT, ["fgsm"], checks=False)
    assert report.clean_accuracy == 1.0
    assert [FAULT in text for text in report.rows[0].warnings] == [True]
    assert FAULT in report.table()
    assert "WARNINGS (fgsm)" in repr(report) and len(repr(report).splitlines()) <= 5


def test_a_right_short_cut_is_taken_without_a_word():
    model = model_zoo.model_of("functional")
    assert attacked(model).warnings == ()
    victim = Victim(model)
    assert victim.for_many_passes() is not victim


class Coupled(keras.layers.Layer):
    """Its answer to an image depends on the others in the batch."""

    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)


def test_halves_of_a_batch_are_not_taken_where_they_matter(monkeypatch):
    small_limits.take_every_trick(monkeypatch)
    layers = [keras.layers.Flatten(), keras.layers.Dense(4)]
    alone = keras.Sequential([keras.Input(model_zoo.SHAPE), *layers])
    images = model_zoo.images().numpy()
    assert agreed(alone, images)[1] == () and is_trusted(alone)
    together = keras.Sequential([keras.Input(model_zoo.SHAPE), Coupled(), *layers])
    victim, warnings = agreed(together, images)
    assert victim.for_many_passes() is victim and FAULT in warnings[0]


class Noisy(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


def test_a_random_model_is_another_checks_business(monkeypatch):
    small_limits.take_every_trick(monkeypatch)
    model = keras.Sequential([keras.Input(model_zoo.SHAPE), Noisy(), keras.layers.Flatten()])
    victim, warnings = agreed(model, model_zoo.images().numpy())
    assert victim.for_many_passes() is victim and warnings == ()


class Eager:
    """Counts the passes that run outside any graph."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def __call__(self, images):
        self.calls += tf.executing_eagerly()
        return self.model(images, training=False)


def test_an_ensemble_makes_two_passes_outside_a_graph():
    """It made 15 once, as every attack in it looked at the model; then 6, to look for noise."""
    model = Eager(model_zoo.model_of("lenet"))
    ensemble = he.attacks.Ensemble(THREAT, [he.attacks.FGSM(THREAT), he.attacks.BIM(THREAT, 2)])
    ensemble(model, model_zoo.images().numpy(), np.zeros(6, int))
    assert model.calls == 2


def test_an_evaluation_probes_once_whatever_the_number_of_batches():
    images, calls = model_zoo.images(24).numpy(), []
    for batch_size in (12, 3):
        model = Eager(model_zoo.model_of("lenet"))
        he.evaluate_robustness(
            model,
            (images, np.zeros(24, int)),
            THREAT,
            ["fgsm"],
            batch_size=batch_size,
            checks=False,
        )
        calls.append(model.calls)
    assert calls[0] == calls[1] <= 2


def test_a_model_is_probed_again_for_other_weights_and_settings():
    model, images = model_zoo.model_of("functional"), model_zoo.images().numpy()
    first = probe(model, images)
    with standing_still():
        assert probe(model, images) is probe(model, images)
        before = probe(model, images)
        model.head.scale = 1.0
        assert np.abs(probe(model, images).logits - before.logits).max() > 0.1
    assert np.abs(probe(model, images).logits - first.logits).max() > 0.1


def test_rounding_is_relative_to_the_spread_and_the_dtype():
    logits = np.array([[1.0, 3.0], [0.0, 1.0]], np.float32)
    layers = {
        name: keras.layers.Dense(2, dtype=f"mixed_{name}") for name in ("float16", "bfloat16")
    }
    single = difference_by_rounding(logits, lambda images: images)
    assert single == pytest.approx(0.002, rel=0.01)
    half, brain = (difference_by_rounding(logits, layer) for layer in layers.values())
    assert half == pytest.approx(8 * 2**-10 * 5.0) and brain == pytest.approx(8 * 2**-7 * 5.0)
    assert difference_by_rounding(10 * logits, layers["float16"]) == pytest.approx(10 * half)


def test_infinity_on_one_path_only_is_a_difference():
    finite, infinite = np.zeros((2, 2), np.float32), np.full((2, 2), np.inf, np.float32)
    assert largest_difference(infinite, finite) == np.inf
    assert largest_difference(infinite, infinite) == 0.0


class Turned:
    """Logits whose sign is a Python number."""

    def __init__(self):
        self.sign, self.traces = 1.0, []
        self.weights = np.random.RandomState(0).normal(size=(6, 3)).astype("float32")

    def __call__(self, images):
        self.traces += [] if tf.executing_eagerly() else [images.shape]
        return self.sign * tf.matmul(images, self.weights)


@pytest.mark.fast_cases("array in place", "number")
@pytest.mark.parametrize("change", ["number", "array in place"])
def test_callable_that_has_changed_inside_is_compiled_anew(change):
    draw = np.random.RandomState(1)
    images = draw.uniform(size=(20, 6)).astype("float32")
    model, attack = Turned(), he.attacks.get("pgd-2", he.ThreatModel("linf", 0.05))
    labels = np.asarray(model(images)).argmax(1)
    before = attack(model, images, labels)
    traces = len(model.traces)
    np.testing.assert_array_equal(attack(model, images, labels).x_adv, before.x_adv)
    assert len(model.traces) == traces > 0
    if change == "number":
        model.sign = -1.0
    else:
        model.weights *= -1.0
    after = attack(model, images, labels)
    fresh = he.attacks.get("pgd-2", he.ThreatModel("linf", 0.05))(model, images, labels)
    assert before.robust_accuracy > 0.5 > after.robust_accuracy
    np.testing.assert_array_equal(after.success, fresh.success)
    np.testing.assert_allclose(after.margin, fresh.margin, rtol=1e-6)


def test_random_callable_is_not_compiled_at_each_call():
    images = np.random.RandomState(1).uniform(size=(12, 6)).astype("float32")
    weights = tf.constant(np.random.RandomState(0).normal(size=(6, 3)), tf.float32)
    generator = tf.random.Generator.from_seed(0)
    traces = []

    def model(images):
        traces.extend([] if tf.executing_eagerly() else [images.shape])
        return images @ weights + generator.normal([3])

    attack = he.attacks.get("pgd-2", he.ThreatModel("linf", 0.05))
    attack(model, images, np.zeros(12, int))
    first = len(traces)
    attack(model, images, np.zeros(12, int))
    assert len(traces) == first > 0
