"""Targeted APGD: which targets, in which order, for whom, and what is returned."""

import numpy as np
import pytest
import tensorflow as tf
from apgd_problem import EXAMPLES, NETWORK, THREATS, problem, run
from apgd_reference import CLASSES
from attack_victims import seeds_of

import he_keras as he
from he_keras import attacks, losses
from he_keras.attacks import Victim
from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.result import Goal

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

PARITY = {"random_start": False, "stop_when_broken": False}


def one_after_the_other(attack):
    """The same in plain Python: a separate search for each target, in a loop over ranks."""
    images, labels, _ = problem()
    order = np.argsort(-NETWORK(tf.constant(images)).numpy(), axis=1)
    broken = order[:, 0] != labels
    x_adv, best, passes = images.copy(), np.full(EXAMPLES, -np.inf), np.zeros(EXAMPLES, int)
    for rank in range(1, min(attack.num_targets + 1, CLASSES)):
        rows = np.flatnonzero(~broken)
        inputs = images[rows], labels[rows], order[rows, rank].astype(np.int32)
        inputs = tf.constant(inputs[0]), Goal(tf.constant(inputs[1])), tf.constant(inputs[2])
        seeds = seeds_of(EXAMPLES)[rows]
        start = attack._start(inputs[0], tf.constant(seeds), rank - 1)
        state = attack.search(Victim(NETWORK), inputs, start)
        found, loss = state.broken.numpy(), state.best.strength.numpy()
        taken = found | (loss > best[rows])
        points = np.where(found[:, None, None, None], state.adversarial, state.best.point[0])
        x_adv[rows[taken]], best[rows[taken]] = points[taken], loss[taken]
        broken[rows] |= found
        passes[rows] += state.passes.numpy()
    return x_adv, broken, passes


@pytest.mark.parametrize("stop_when_broken", [True, False])
@pytest.mark.parametrize("norm", THREATS)
def test_targets_are_tried_one_after_the_other(norm, stop_when_broken):
    threat = he.ThreatModel(norm, 0.3 * THREATS[norm].epsilon)
    attack = APGDTargeted(threat, num_steps=8, stop_when_broken=stop_when_broken)
    x_adv, broken, passes = one_after_the_other(attack)
    crafted = run(attack)
    np.testing.assert_allclose(crafted.x_adv, x_adv, atol=1e-9)
    np.testing.assert_array_equal(crafted.backward_passes, passes)
    # One more pass ranks the targets.
    np.testing.assert_array_equal(crafted.forward_passes, passes + 1)
    # Held ones take four targets; some break, not all by the first one.
    assert passes.max() == 4 * 9
    assert 0 < (broken & (passes > 0)).sum() < EXAMPLES
    assert np.all(passes[broken] < 36 if stop_when_broken else passes[broken] % 9 == 0)


def test_only_the_first_targets_are_tried():
    attack = APGDTargeted(he.ThreatModel("linf", 0.001), num_steps=2, num_targets=3)
    passes = run(attack).backward_passes.numpy()
    wrong = NETWORK(tf.constant(problem()[0])).numpy().argmax(axis=1) != problem()[1]
    np.testing.assert_array_equal(passes, np.where(wrong, 0, 9))


def test_compiled_result_and_counts():
    """Through the framework, which leaves out what is misclassified and scores the rest."""
    images, labels, _ = problem()
    attack = APGDTargeted(THREATS["linf"], num_steps=8, batch_size=5)
    crafted = run(attack)
    result = attack(NETWORK, images, labels)
    np.testing.assert_allclose(result.x_adv, crafted.x_adv, atol=1e-9)
    attacked = crafted.backward_passes.numpy() > 0
    np.testing.assert_array_equal(result.backward_passes, crafted.backward_passes)
    # Clean check, ranking, score.
    extra = np.where(attacked, 2, 0)
    np.testing.assert_array_equal(result.forward_passes, crafted.forward_passes + extra)


def test_the_largest_loss_over_all_targets_is_returned():
    images, labels, _ = problem()
    threat = he.ThreatModel("linf", 0.002)
    attack = APGDTargeted(threat, num_steps=6, random_start=False, loss="cw")
    held = NETWORK(tf.constant(images)).numpy().argmax(axis=1) == labels
    margin = losses.margin(NETWORK(run(attack).x_adv), labels).numpy()
    ranking = np.argsort(-NETWORK(tf.constant(images)).numpy(), axis=1).astype(np.int32)
    best = np.full(EXAMPLES, -np.inf)
    for rank in range(1, CLASSES):
        inputs = tf.constant(images), Goal(tf.constant(labels)), tf.constant(ranking[:, rank])
        best = np.maximum(best, attack.search(Victim(NETWORK), inputs, images).best.strength)
    np.testing.assert_allclose(-margin[held], best[held], atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_have_the_difference_of_logits(classes):
    images, _, _ = problem()

    def model(batch):
        return NETWORK(batch)[:, :classes]

    labels = model(tf.constant(images)).numpy().argmax(axis=1).astype(np.int32)
    with pytest.raises(ValueError, match="Too few classes for apgd-t; expected at least 4"):
        APGDTargeted(THREATS["linf"])(model, images, labels)
    attack = APGDTargeted(THREATS["linf"], loss="cw", num_steps=6, **PARITY)
    assert attack.min_classes == 2
    targeted = run(attack, model, labels)
    if classes == 2:
        # There is one target, and the difference is the margin.
        margin = run(APGD(THREATS["linf"], "cw", 6, **PARITY), model, labels)
        np.testing.assert_allclose(targeted.x_adv, margin.x_adv, atol=1e-9)
        np.testing.assert_array_equal(targeted.backward_passes, 7)
    else:
        assert targeted.backward_passes.numpy().max() == 14


def graph_size(attack):
    signature = (
        tf.TensorSpec([None, 2, 4, 3], tf.float64),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, 2], tf.int32),
    )

    def perturb(images, labels, seeds):
        return attack.perturb(Victim(NETWORK), images, labels, seeds)

    graph = tf.function(perturb, input_signature=signature).get_concrete_function().graph
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(each.node_def) for each in definition.library.function)


def test_the_network_is_traced_once_for_all_steps_and_targets():
    sizes = {
        graph_size(APGDTargeted(THREATS["linf"], num_steps=steps, num_targets=targets))
        for steps, targets in ((3, 1), (100, 9))
    }
    assert len(sizes) == 1
    sizes = {graph_size(APGD(THREATS["linf"], num_steps=steps)) for steps in (3, 100)}
    assert len(sizes) == 1


def test_name_and_configuration():
    attack = attacks.get("apgd-t-30", THREATS["linf"], num_targets=3)
    assert (attack.num_steps, attack.num_targets, attack.loss) == (30, 3, "dlr-targeted")
    assert (attack.name, attack.min_classes) == ("apgd-t-30", 4)
    again = APGDTargeted.from_config(attack.get_config())
    assert again.get_config() == attack.get_config()
    assert APGDTargeted(THREATS["linf"]).num_targets == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_targets": 0}, "Invalid num_targets"),
        ({"loss": "ce"}, "Unknown loss; expected one of .*'dlr-targeted', 'cw'"),
        ({"keep": "last"}, "APGD returns its best point"),
    ],
)
def test_wrong_arguments(settings, message):
    with pytest.raises(ValueError, match=message):
        APGDTargeted(THREATS["linf"], **settings)
