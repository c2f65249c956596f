"""Attacks compile once, see current weights, and work inside other functions."""

import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    PARITY,
    PIXELS,
    THREAT,
    Counting,
    Module,
    cosine_model,
    functional,
    images,
    labels,
    linear,
    seeds_of,
    weights,
)

import he_keras as he
from he_keras import attacks
from he_keras.attacks import (
    BIM,
    PGD,
    AdaptivePGD,
    Victim,
)

# Compilation.


@pytest.mark.slow
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

    function = tf.function(perturb, input_signature=signature, autograph=False)
    graph = function.get_concrete_function().graph
    definition = graph.as_graph_def()
    inner = sum(len(function.node_def) for function in definition.library.function)
    return len(definition.node) + inner


@pytest.mark.fast_cases("pgd", "mim")
@pytest.mark.parametrize("name", ["bim", "pgd", "mim", "cw-linf", "adaptive-pgd"])
def test_graph_size_does_not_depend_on_the_number_of_steps(name):
    sizes = [graph_size(attacks.get(f"{name}-{steps}", THREAT)) for steps in (2, 500)]
    assert sizes[0] == sizes[1]


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


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "value"), [("scale", 2.0), ("margin", 0.9)])
def test_a_head_whose_scale_or_margin_changed_is_compiled_anew(setting, value):
    model, threat = cosine_model(), he.ThreatModel("l2", 0.05)
    right = model(images()).numpy().argmax(axis=1)
    calls = []

    class Recording(attacks.ProjectedGradient):
        def run(self, *arguments):
            calls.append(1)
            return super().run(*arguments)

    attack = Recording(threat, 2, margin="model", **PARITY)
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


@pytest.mark.fast_cases("fgsm", "mim-3")
@pytest.mark.parametrize("name", ["fgsm", "pgd-3", "mim-3"])
def test_perturb_inside_another_function(name):
    attack = attacks.get(name, THREAT, step_size=0.01, stop_when_broken=False, keep="last")
    model, batch = functional(), tf.constant(images())
    targets = tf.constant(labels(), tf.int32)

    @tf.function
    def inside(x, y, seeds):
        return attack.perturb(Victim(model), x, y, seeds)

    each = seeds_of(20)
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
