"""Every attack inside somebody else's function: any batch size or one, compiled by XLA or not."""

import functools

import keras
import numpy as np
import pytest
import registered_attacks
import tensorflow as tf
from attack_victims import seeds_of

import he_keras as he
from he_keras import attacks, objectives
from he_keras.attacks import Victim

LINF = he.ThreatModel("linf", 0.03)
EXAMPLES, CLASSES = 6, 5
integers = tf.random.stateless_uniform


@pytest.fixture
def same_draws(monkeypatch):
    """Draws that XLA makes alike: from integers, of seeds that are never negative."""

    def uniform(shape, seed, minval=0, maxval=None, dtype=tf.float32):
        if tf.as_dtype(dtype).is_integer:
            return integers(shape, seed, minval, maxval, dtype)
        unit = tf.cast(integers(shape, seed, 0, 2**24, tf.int32), dtype) / 2**24
        return minval + unit * ((1.0 if maxval is None else maxval) - minval)

    def normal(shape, seed, dtype=tf.float32):
        angle = uniform(shape, fold_in(seed, 77), 0.0, 2 * np.pi, dtype)
        return tf.sqrt(-2 * tf.math.log(uniform(shape, seed, 1e-3, 1.0, dtype))) * tf.cos(angle)

    def fold_in(seed, number):
        return tf.stack([integers([], seed, 0, 2**30, tf.int32), tf.cast(number, tf.int32)])

    for name, replacement in (
        ("stateless_uniform", uniform),
        ("stateless_normal", normal),
        ("fold_in", fold_in),
    ):
        monkeypatch.setattr(tf.random, name, replacement)


@functools.cache
def problem():
    """A linear classifier in float64, where rounding turns no sign, and its examples."""
    layers, random = keras.layers, np.random.default_rng(0)
    inputs = keras.Input((8, 8, 3), dtype="float64")
    features = layers.Identity(dtype="float64")(layers.Flatten(dtype="float64")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES, dtype="float64")(features))
    model.set_weights([0.2 * random.normal(size=each.shape) for each in model.get_weights()])
    images = random.uniform(size=(EXAMPLES, 8, 8, 3))
    labels = model(images).numpy().argmax(axis=1).astype(np.int32)
    labels[0] = (labels[0] + 1) % CLASSES
    return model, images, labels


def perturbed(attack, size, xla):
    """What `perturb` makes of the examples in a function for batches of this size."""
    model, images, labels = problem()
    arguments = images, labels, seeds_of(EXAMPLES)
    signature = [tf.TensorSpec([size, *each.shape[1:]], each.dtype) for each in arguments]
    inside = tf.function(lambda *each: attack.perturb(Victim(model), *each), jit_compile=xla)
    return inside.get_concrete_function(*signature)(*map(tf.constant, arguments)).numpy()


@functools.cache
def plain_call(name, stop_when_broken):
    """What a call of the attack finds, by draws as `same_draws` makes them."""
    model, images, labels = problem()
    return build(name, stop_when_broken=stop_when_broken)(model, images, labels)


def build(name, **options):
    threat = he.ThreatModel("l2", 0.5) if name == "cw-l2-K" else LINF
    return registered_attacks.build(name, threat, **options)


#: Whether examples stop when they are broken, whether XLA compiles, and the batch sizes to try.
KINDS = {
    "graph": (True, False, (None, EXAMPLES)),
    "graph-to-the-end": (False, False, (EXAMPLES,)),
    "xla": (True, True, (None,)),
    "xla-to-the-end": (False, True, (EXAMPLES,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", attacks.names())
def test_every_function_gives_what_a_plain_call_gives(name, kind, same_draws):
    """Same images as a call of the attack makes, so same verdicts; or a refusal by name."""
    stop_when_broken, xla, sizes = KINDS[kind]
    model, _, labels = problem()
    attack = build(name, stop_when_broken=stop_when_broken)
    if not attack.runs_inside_graphs:
        with pytest.raises(TypeError, match=f"{attack.name} cannot run inside another graph"):
            perturbed(attack, None, xla)
        return
    plain = plain_call(name, stop_when_broken)
    attacked = plain.forward_passes > 1
    assert attacked.any()
    for size in sizes:
        x_adv = perturbed(attack, size, xla)
        np.testing.assert_allclose(x_adv[attacked], plain.x_adv[attacked], atol=1e-9)
    wrong = model(x_adv).numpy().argmax(axis=1) != labels
    np.testing.assert_array_equal(wrong, plain.success)


@pytest.mark.fast_cases("pgd-K")
@pytest.mark.parametrize("name", ["pgd-K", "spsa-K", "multi-targeted-K"])
def test_one_batch_size_and_every_example_to_the_end(name):
    """A comparison loses its shape where one side alone knows the batch size."""
    attack = build(name, stop_when_broken=False)
    moved = np.abs(perturbed(attack, EXAMPLES, xla=False) - problem()[1])
    assert 0.02 < moved.max() <= LINF.epsilon + 1e-9


def test_what_xla_cannot_compile_says_so():
    attack = attacks.get("square-10", he.ThreatModel("l2", 0.5))
    with pytest.raises(ValueError, match="XLA cannot compile square-10 in l2, .*expected jit_co"):
        perturbed(attack, EXAMPLES, xla=True)
    model = trained_model(attack)
    with pytest.raises(ValueError, match="XLA cannot compile square-10 in l2"):
        model.compile(jit_compile=True)


# Inside `evaluate`.


def trained_model(evaluation_attack="default"):
    network = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten()])
    objective = objectives.PGDAT(he.ThreatModel("linf", 0.1), num_steps=2)
    head = he.CosineHead(3, scale=10.0)
    model = he.HEAdversarialModel(network, head, objective, evaluation_attack)
    head.set_weights([np.random.default_rng(0).normal(size=(16, 3))])
    return model


def evaluated(model, batch_size=8, drop_remainder=False):
    images = np.random.default_rng(1).uniform(size=(24, 4, 4, 1)).astype(np.float32)
    labels = np.arange(24) % 3
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    batches = data.batch(batch_size, drop_remainder=drop_remainder)
    return model.evaluate(batches, verbose=0, return_dict=True)


@pytest.mark.slow
def test_evaluation_under_xla_and_of_batches_whose_size_is_known(same_draws):
    """With the default attack; XLA cannot drop broken examples."""
    plain, compiled = trained_model(), trained_model()
    plain.compile()
    compiled.compile(jit_compile=True)
    expected = evaluated(plain)
    assert 0 < expected["robust_accuracy"] < expected["accuracy"]
    for model in (plain, compiled):
        found = evaluated(model, drop_remainder=True)
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 7, 24])
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_evaluation_under_xla_in_any_batches(batch_size, drop_remainder, same_draws):
    plain, compiled = trained_model(), trained_model()
    plain.compile()
    compiled.compile(jit_compile=True)
    expected = evaluated(plain, batch_size, drop_remainder)
    assert evaluated(compiled, batch_size, drop_remainder) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_evaluation_on_replicas():
    plain = trained_model()
    plain.compile()
    with he.distribution.strategy("mirrored").scope():
        model = trained_model()
        model.compile()
    expected = evaluated(plain)
    for drop_remainder in (True, False):
        found = evaluated(model, drop_remainder=drop_remainder)
        assert found == pytest.approx(expected, abs=1e-6)


def test_attacks_that_evaluate_cannot_run_are_refused_when_they_are_given():
    with pytest.raises(TypeError, match="fast cannot run inside another graph"):
        trained_model("fast")
    restarts = attacks.get("pgd-2", LINF, num_restarts=3)
    with pytest.raises(ValueError, match="pgd-2 runs only once inside.*received num_restarts=3"):
        trained_model(restarts)
    model = trained_model()
    with pytest.raises(ValueError, match="received num_restarts=3"):
        model.evaluation_attack = restarts


def test_another_evaluation_attack_takes_effect():
    """After the first evaluation too, whose compiled function holds the attack before."""
    model = trained_model(attacks.get("pgd-2", he.ThreatModel("linf", 1e-6)))
    model.compile()
    before = evaluated(model)
    assert before["robust_accuracy"] == before["accuracy"]
    model.evaluation_attack = "cw-linf-5"
    assert evaluated(model)["robust_accuracy"] < before["accuracy"]
