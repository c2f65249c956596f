"""What every registered attack promises, in every norm, with float32 and bfloat16 bodies.

A new attack is picked up by its name; where it does not know a norm, its constructor must say so.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import registered_attacks
import tensorflow as tf
from attack_victims import seeds_of

import he_keras as he
from he_keras import attacks, losses
from he_keras.attacks import ProjectedGradient, Victim

THREATS = {
    "linf": he.ThreatModel("linf", "8/255"),
    "l2": he.ThreatModel("l2", 0.25),
    "l1": he.ThreatModel("l1", 1.5),
}
# Rounding of a logit of size 10, which differs between eager and fused operations.
POLICIES = {"float32": 1e-4, "mixed_bfloat16": 0.2}
CLASSES = 5
EXAMPLES = 24
#: What the fast tests try in l2 and with bfloat16 bodies; the slow ones try all, and l1.
IN_L2 = ("pgd", "apgd-t", "cw-l2")
IN_BFLOAT16 = ("pgd", "apgd-ce")
#: Settings of attacks that are tried in every norm; these are tried in linf, by slow tests.
LIKE_OTHERS = ("adaptive-pgd", "apgd-dlr", "bim", "fab", "fgsm", "mim", "nes")
#: Ensembles of attacks that are tried one by one: like AutoAttack, which is tried in every norm.
LIKE_AUTOATTACK = ("autoattack-plus", "autoattack-rand", "fast")
#: What consists of the attacks of another ensemble, or is another name of one.
SAME_ATTACKS = ("autoattack-fast-first", "screen")
# Rounding differs between batch sizes, and decides the sign of a gradient near zero.
PIXELS_MOVED_BY_ROUNDING = 1e-3


def cases():
    """Every attack in every norm, and with bfloat16 in linf: perturbations are float32 anyway."""
    for name in attacks.names():
        base = registered_attacks.base_name(name)
        if base in SAME_ATTACKS:
            continue
        for norm in THREATS:
            for policy in POLICIES:
                if policy != "float32" and norm != "linf":
                    continue
                is_like_others = base in (*LIKE_AUTOATTACK, *LIKE_OTHERS)
                if is_like_others and (norm, policy) != ("linf", "float32"):
                    continue
                is_slow = (
                    base in (*registered_attacks.SLOW, *LIKE_OTHERS)
                    or (norm == "l2" and base not in IN_L2)
                    or (policy != "float32" and base not in IN_BFLOAT16)
                    or norm == "l1"
                )
                marks = [pytest.mark.slow] if is_slow else []
                yield pytest.param((name, norm, policy), marks=marks, id=f"{name}/{norm}/{policy}")


def build(name, norm, **options):
    try:
        return registered_attacks.build(name, THREATS[norm], **options)
    except ValueError as error:
        if norm in str(error):
            pytest.skip(f"{name} refuses {norm}: {error}")
        raise


@functools.cache
def problem(policy):
    """A small network with batch norm and dropout, images, and labels that it mostly predicts."""
    random = np.random.default_rng(7)
    images = random.uniform(size=(EXAMPLES, 8, 8, 3)).astype(np.float32)
    images[:3, :2] = 0.0
    images[:3, -2:] = 1.0
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input((8, 8, 3), dtype="float32"),
            layers.Conv2D(8, 3, strides=2, dtype=policy),
            layers.BatchNormalization(dtype=policy, momentum=0.5),
            layers.Activation("relu", dtype=policy),
            layers.Dropout(0.5, dtype=policy, seed=1),
            layers.Flatten(dtype=policy),
            layers.Dense(16, activation="relu", dtype=policy),
        ]
    )
    model = he.HEAdversarialModel(network, he.CosineHead(CLASSES, scale=10.0, margin=0.2))
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape, scale=0.3))
    for _ in range(5):
        network(images, training=True)
    labels = model(images, training=False).numpy().argmax(axis=1)
    labels[::6] = (labels[::6] + 1) % CLASSES
    return model, images, labels.astype(np.int64)


@dataclasses.dataclass
class Case:
    """One attack on one network, compiled once, and what its calls returned."""

    name: str
    norm: str
    policy: str
    attack: attacks.Attack
    model: keras.Model
    images: np.ndarray
    labels: np.ndarray
    results: dict
    again: attacks.AttackResult
    reseeding: dict
    variables_before: list
    variables_after: list

    @property
    def result(self):
        return self.results[64]

    def clean_wrong(self):
        return self.margins(self.images) < 0

    def margins(self, images):
        logits = self.model(images, training=False)
        return losses.margin(logits, tf.constant(self.labels)).numpy()


@pytest.fixture(scope="module", params=cases())
def case(request):
    name, norm, policy = request.param
    model, images, labels = problem(policy)
    attack = build(name, norm)
    before = [variable.numpy() for variable in model.variables]
    results = {}
    # One by one is slow, and no norm and no precision makes a difference to it.
    for batch_size in (64, 7, 1) if (norm, policy) == ("linf", "float32") else (64, 7):
        # Past the seal: it is not compiled in, so that one attack serves all sizes.
        vars(attack)["batch_size"] = batch_size
        results[batch_size] = attack(model, images, labels)
    vars(attack)["batch_size"] = 64
    again = attack(model, images, labels)
    after = [variable.numpy() for variable in model.variables]
    reseeding = reseeded(attack, name, norm, (model, images, labels))
    return Case(
        name, norm, policy, attack, model, images, labels, results, again, reseeding, before, after
    )


def reseeded(attack, name, norm, attacked):
    """The results of half of the examples, of all of them, and of all from another seed."""
    model, images, labels = attacked
    if hasattr(attack, "use_targets"):
        attack.use_targets(images, labels)
    half = attack(model, images[::2], labels[::2], example_ids=np.arange(EXAMPLES)[::2])
    results = {"half": half, "whole": attack(model, images, labels)}
    if getattr(attack, "random_start", False) is not False:
        # Past the seal: the seed is no part of what was compiled.
        vars(attack)["seed"] = build(name, norm, seed=1).seed
        results["other"] = attack(model, images, labels)
        vars(attack)["seed"] = build(name, norm).seed
    return results


def test_inside_ball_and_bounds(case):
    threat = THREATS[case.norm]
    for result in case.results.values():
        assert result.x_adv.shape == case.images.shape
        assert result.x_adv.dtype == case.images.dtype
        assert result.x_adv.min() >= 0.0 and result.x_adv.max() <= 1.0
        difference = (result.x_adv.astype(np.float64) - case.images).reshape(EXAMPLES, -1)
        order = {"linf": np.inf, "l2": 2, "l1": 1}[case.norm]
        length = np.linalg.norm(difference, order, axis=1)
        # A sum of many rounded terms is exact only relative to its size.
        slack = 1e-5 * threat.epsilon if case.norm == "l1" else 1e-6
        assert length.max() <= threat.epsilon + slack
        found = result.x_nearest.astype(np.float64) - case.images
        found = np.linalg.norm(found.reshape(EXAMPLES, -1), order, axis=1)
        reached = np.isfinite(result.distance)
        np.testing.assert_allclose(result.distance[reached], found[reached], rtol=1e-4, atol=1e-6)
        if case.attack.minimum_norm:
            within = result.distance <= threat.epsilon
            np.testing.assert_array_equal(within, result.success)
        else:
            np.testing.assert_array_equal(result.x_nearest, result.x_adv)
        assert not result.non_finite.any()


def test_no_weight_and_no_statistic_changes(case):
    assert len(case.variables_before) > len(case.model.trainable_variables)
    for before, after in zip(case.variables_before, case.variables_after, strict=True):
        np.testing.assert_array_equal(before, after)


def test_success_is_the_models_verdict_on_the_images_returned(case):
    margins = case.margins(case.result.x_adv)
    certain = np.abs(margins) > POLICIES[case.policy]
    # Minimum-norm attacks end on the boundary, where rounding decides.
    assert certain.mean() > (0.1 if case.attack.minimum_norm else 0.5)
    np.testing.assert_array_equal(case.result.success[certain], margins[certain] < 0)


def test_batch_size_changes_nothing(case):
    for other in list(case.results.values())[1:]:
        np.testing.assert_array_equal(case.result.success, other.success)
        moved = np.abs(case.result.x_adv - other.x_adv) > 1e-5
        assert moved.mean() <= PIXELS_MOVED_BY_ROUNDING
        np.testing.assert_array_equal(case.result.backward_passes, other.backward_passes)
        np.testing.assert_array_equal(case.result.forward_passes, other.forward_passes)


def test_a_second_call_is_identical(case):
    for field in dataclasses.fields(case.again):
        np.testing.assert_array_equal(
            getattr(case.again, field.name), getattr(case.result, field.name), err_msg=field.name
        )


def test_examples_that_are_wrong_from_the_start_are_left_alone(case):
    wrong = case.clean_wrong()
    assert 0 < wrong.sum() < EXAMPLES
    for result in case.results.values():
        assert result.success[wrong].all()
        np.testing.assert_array_equal(result.x_adv[wrong], case.images[wrong])
        np.testing.assert_array_equal(result.distance[wrong], 0.0)
        np.testing.assert_array_equal(result.backward_passes[wrong], 0)
        np.testing.assert_array_equal(result.forward_passes[wrong], 1)
        assert np.all(result.forward_passes[~wrong] > 1)


def test_never_weaker_than_its_start(case):
    attack = case.attack
    if type(attack) is not ProjectedGradient:
        pytest.skip("starts in its own way")
    right = ~case.clean_wrong()
    images, labels = tf.constant(case.images), tf.constant(case.labels)
    start = attack.threat.start(attack.random_start, images, seeds_of(EXAMPLES))
    victim = Victim(case.model)
    margin = victim.head_margin() if attack.margin == "model" else 0.0
    clean = victim.logits(images)
    loss = {
        "ce": losses.cross_entropy,
        "cw": losses.cw_margin,
        "kl": lambda logits, _labels: losses.kl_divergence(clean, logits),
    }[attack.loss]

    def loss_and_verdict(points):
        logits = victim.logits(points)
        wrong = np.argmax(logits, axis=1) != case.labels
        return loss(case.model.head.with_margin(logits, labels, margin), labels).numpy(), wrong

    start_loss, start_broken = loss_and_verdict(start)
    end_loss, end_broken = loss_and_verdict(case.result.x_adv)
    assert np.all(end_broken[start_broken & right])
    unbroken = right & ~end_broken
    assert np.all(end_loss[unbroken] >= start_loss[unbroken] - 1e-5)
    # It also gains something: an attack that returns its start would pass the lines above.
    assert end_loss[right].mean() > start_loss[right].mean() + 0.01


def test_passes_are_counted(case):
    attack = case.attack
    if not isinstance(attack, ProjectedGradient):
        pytest.skip("counted in its own tests")
    held = ~case.result.success
    broken = case.result.success & ~case.clean_wrong()
    steps = attack.num_steps
    assert steps == (1 if attack.name == "fgsm" else registered_attacks.BUDGET)
    assert held.any()
    # Clean check, K steps, the score of the last iterate: the best one's is known by then.
    scores = 2 + (attack.loss == "kl")
    np.testing.assert_array_equal(case.result.forward_passes[held], steps + scores)
    np.testing.assert_array_equal(case.result.backward_passes[held], steps)
    spent = case.result.backward_passes[broken]
    assert np.all((spent >= 1) & (spent <= steps))
    np.testing.assert_array_equal(case.result.forward_passes[broken], spent + scores)


def test_seeds(case):
    half, whole = case.reseeding["half"], case.reseeding["whole"]
    # An example is attacked alike alone and among others, when its number is passed.
    np.testing.assert_array_equal(half.success, whole.success[::2])
    moved = np.abs(half.x_adv - whole.x_adv[::2]) > 1e-5
    assert moved.mean() <= PIXELS_MOVED_BY_ROUNDING
    if "other" not in case.reseeding:
        pytest.skip("draws nothing at random")
    other = case.reseeding["other"]
    moved = np.abs(other.x_adv - whole.x_adv).reshape(EXAMPLES, -1).max(axis=1) > 1e-4
    attacked = whole.forward_passes > 1
    assert not moved[~attacked].any()
    # Steps in l1 change few pixels, and may end at the same few from different starts.
    assert moved[attacked].mean() > 0.8 if case.norm == "l1" else moved[attacked].all()


@pytest.mark.parametrize("name", attacks.names())
@pytest.mark.parametrize("norm", THREATS)
def test_configuration_survives_serialization(name, norm):
    import json

    attack = build(name, norm, seed=3, batch_size=9, num_restarts=2)
    data = json.loads(json.dumps(keras.saving.serialize_keras_object(attack)))
    again = keras.saving.deserialize_keras_object(data)
    assert type(again) is type(attack)
    assert again.get_config() == attack.get_config()
    assert (again.threat, again.name) == (attack.threat, attack.name)
    assert again.min_classes == attack.min_classes
    assert attack.seed == 3
