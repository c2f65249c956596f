"""APGD and targeted APGD against the outputs stored from the official code.

Success flags detect none of the usual mistakes (`goldens/README.md`, section 9): what counts here
are the losses, the whole traces of losses and step sizes, and single iterates.
"""

import functools

import golden_models
import numpy as np
import pytest
import tensorflow as tf
from apgd_reference import trace
from golden_attacks import differing_pixels

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.result import Goal

pytestmark = pytest.mark.slow

LINF, L2 = he.ThreatModel("linf", "8/255"), he.ThreatModel("l2", 0.5)
# How the stored runs were made: from the image itself, every example to its end.
PARITY = {"random_start": False, "stop_when_broken": False}
UNTARGETED = {
    "apgd_ce": ("apgd", LINF, "ce"),
    "apgd_dlr": ("apgd", LINF, "dlr"),
    "apgd_ce_l2": ("l2", L2, "ce"),
}
TARGETED = {"apgd_t": ("apgd", LINF), "apgd_t_l2": ("l2", L2)}

both_heads = pytest.mark.parametrize("head", golden_models.HEADS)


@functools.cache
def model(head):
    """The golden model; call this outside `tf.function`, where weights could not be set."""
    return golden_models.classifier(head)


def examples():
    return golden_models.images(), golden_models.labels().astype(np.int32)


def stored_outputs(head, name):
    block = {**UNTARGETED, **TARGETED}[name][0]
    return golden_models.outputs(block, head, name), golden_models.tolerances(head, name)


@functools.cache
def traced(head, name):
    """Every iterate, loss and step size of one attack."""
    _, threat, loss = UNTARGETED[name]
    attack = APGD(threat, loss, **PARITY)
    images, labels = examples()
    run = trace(attack, model(head), (tf.constant(images), tf.constant(labels)), images)
    run["losses"] = np.stack([memory.last_loss for memory in run["memory"]])
    return run


def samples_within(values, expected, tolerance):
    """Number of samples, on the last axis, of which everything agrees."""
    close = np.abs(values - expected) <= tolerance
    return close.reshape(-1, close.shape[-1]).all(axis=0).sum()


def on_plateau(name, stored):
    """Samples whose DLR has come to 1, the value where the true class is the third.

    The gradient is exactly zero there. Rounding decides whether such a sample, misclassified
    anyway, ever moves again.
    """
    losses = stored.get("probe_loss_best", np.zeros(64))
    plateau = losses >= 0.999 if name == "apgd_dlr" else np.zeros(64, bool)
    assert plateau.sum() < 16
    return plateau


def check_scores(head, x_adv, stored, allowed, rows=slice(None)):
    """Compares losses, and distances of some rows, under the float64 network; returns logits."""
    logits = golden_models.float64_logits(head, x_adv)
    error = np.abs(golden_models.cross_entropy(logits, golden_models.labels()) - stored["ce"])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    difference = (x_adv - golden_models.images()).reshape(64, -1).astype(np.float64)
    for norm, order in (("linf", np.inf), ("l2", 2)):
        error = np.abs(np.linalg.norm(difference, order, axis=1) - stored[norm])
        assert np.quantile(error[rows], 0.95) < 1e-3 * stored[norm].max(), norm
    return logits


@both_heads
@pytest.mark.parametrize("name", UNTARGETED)
def test_traces(head, name):
    stored, allowed = stored_outputs(head, name)
    run = traced(head, name)
    assert np.sum(run["broken"] != stored["apgd_success"]) <= allowed["flags_max_mismatch"]
    close, enough = allowed["loss_best_abs"], allowed["loss_best_min_samples_within"]
    assert samples_within(run["best"][-1], stored["loss_best"], close) >= enough
    # Whole histories, a little fewer than final losses: single steps are more sensitive.
    assert samples_within(run["best"], stored["loss_best_trace"], close) >= enough - 2
    assert samples_within(run["losses"], stored["loss_trace"], 1e-3) >= enough - 4
    equal = samples_within(run["eta"], stored["step_size_trace"], 1e-7)
    # Where nothing is stored: in l2 the loss creeps up at the end, by less than its rounding.
    assert equal >= allowed.get("step_size_traces_equal_min", 48)


@both_heads
@pytest.mark.parametrize("name", UNTARGETED)
def test_iterates(head, name):
    stored, _ = stored_outputs(head, name)
    run = traced(head, name)
    numbers = list(stored["iterate_numbers"])
    assert numbers[-2:] == [22, 23]
    iterates = run["points"][numbers][:, :2]
    np.testing.assert_allclose(iterates[:-1], stored["iterates_of_2"][:-1], atol=1e-6, rtol=0)
    # The first step after the check that may take up the best point; steps are of 0.03 and more.
    np.testing.assert_allclose(iterates[-1], stored["iterates_of_2"][-1], atol=1e-3, rtol=0)
    moved = np.abs(run["adversarial"][:8] - stored["x_last_adv_first8"]).max(axis=(1, 2, 3))
    assert np.sum(moved > 1e-4) <= 1


@both_heads
@pytest.mark.parametrize("name", UNTARGETED)
def test_scores_of_the_best_points(head, name):
    stored, allowed = stored_outputs(head, name)
    best = traced(head, name)["final"]
    logits = check_scores(head, best, stored, allowed, ~on_plateau(name, stored))
    flags = logits.argmax(axis=1) != golden_models.labels()
    assert np.sum(flags != stored["success"]) <= allowed["flags_max_mismatch"]
    # In float32 one or two samples take another path: README, "chaotic samples exist".
    differing = np.sort(differing_pixels(best, stored["x_adv"]))[:-2]
    assert differing.mean() <= allowed["pix_frac_mean"]


def float64_network(head):
    """The golden network computed in float64 inside, as in the stored probes."""
    weights = {
        name: tf.constant(array, tf.float64)
        for name, array in golden_models.arrays(f"model_{head}").items()
    }

    def logits(batch):
        hidden = tf.cast(batch, tf.float64)
        for name in ("conv1", "conv2"):
            padded = tf.pad(hidden, [[0, 0], [1, 1], [1, 1], [0, 0]])
            hidden = tf.nn.conv2d(padded, weights[f"{name}_kernel"], 2, "VALID")
            hidden = tf.nn.relu(hidden + weights[f"{name}_bias"])
        flat = tf.reshape(hidden, [tf.shape(hidden)[0], -1])
        features = tf.nn.relu(flat @ weights["dense1_kernel"] + weights["dense1_bias"])
        kernel = weights["head_kernel"]
        if head == "linear":
            outputs = features @ kernel + weights["head_bias"]
        else:
            cosines = tf.math.l2_normalize(features, 1) @ tf.math.l2_normalize(kernel, 0)
            outputs = golden_models.SCALE * cosines
        return tf.cast(outputs, batch.dtype)

    return logits


@both_heads
@pytest.mark.parametrize("name", UNTARGETED)
def test_without_rounding_in_the_network_every_loss_is_the_stored_one(head, name):
    """The official code, its network in float64: here not one of the 64 samples may differ."""
    stored, allowed = stored_outputs(head, name)
    _, threat, loss = UNTARGETED[name]
    attack, victim = APGD(threat, loss, **PARITY), Victim(float64_network(head))
    images, labels = map(tf.constant, examples())
    state = tf.function(lambda: attack.search(victim, (images, Goal(labels)), images))()
    np.testing.assert_array_equal(state.broken, stored["probe_apgd_success"])
    plateau = on_plateau(name, stored)
    best_loss = state.best.strength.numpy()
    np.testing.assert_allclose(
        best_loss[~plateau],
        stored["probe_loss_best"][~plateau],
        atol=allowed["loss_best_abs"],
        rtol=0,
    )
    assert np.all(best_loss[plateau] >= 0.999)
    # The stored images are those of the float32 network.
    rows = ~plateau[: len(stored["x_adv"])]
    differing = differing_pixels(state.best.point[0].numpy(), stored["x_adv"])
    assert differing[rows].mean() <= allowed["pix_frac_mean"]
    np.testing.assert_array_equal(state.passes, 101)


def cases(fast):
    """All heads and norms; those that are not in `fast` are left to the slow tests."""
    parameters = []
    for head in golden_models.HEADS:
        for name in TARGETED:
            marks = [] if (head, name) in fast else [pytest.mark.slow]
            parameters.append(pytest.param(head, name, marks=marks, id=f"{head}-{name}"))
    return parameters


@pytest.mark.parametrize(("head", "name"), cases(fast=[("linear", "apgd_t_l2")]))
def test_every_target_on_every_sample(head, name):
    stored, allowed = stored_outputs(head, name)
    targets = stored["y_target"]
    attack = APGDTargeted(TARGETED[name][1], **PARITY)
    images, labels = (np.concatenate([each] * len(targets)) for each in examples())
    images, labels, classes = map(
        tf.constant, (images, labels, targets.reshape(-1).astype(np.int32))
    )
    inputs = images, Goal(labels), classes
    victim = Victim(model(head))
    state = tf.function(lambda: attack.search(victim, inputs, inputs[0]))()
    broken = state.broken.numpy().reshape(targets.shape)
    wrong = np.sum(broken != stored["success_per_target"])
    assert wrong <= allowed["per_target_flags_max_mismatch_of_576"]
    difference = np.abs(
        state.best.strength.numpy().reshape(targets.shape) - stored["loss_best_per_target"]
    )
    close = difference <= allowed["per_target_loss_best_abs"]
    assert close.sum() >= allowed["per_target_loss_min_within_of_576"]


@pytest.mark.parametrize(("head", "name"), cases(fast=[("he", "apgd_t")]))
def test_targets_one_after_the_other(head, name):
    stored, allowed = stored_outputs(head, name)
    images, labels = examples()
    order = tf.argsort(model(head)(images), direction="DESCENDING", stable=True)
    np.testing.assert_array_equal(order[:, 1:], stored["y_target"].T)
    result = APGDTargeted(TARGETED[name][1], **PARITY)(model(head), images, labels)
    differing = np.sum(result.success != stored["official_success"])
    assert differing <= allowed["flags_max_mismatch"]
    # The official code returns the image itself where nothing was found, this one its best point.
    both = result.success & stored["official_success"]
    returned = np.where(both[:, None, None, None], result.x_adv, images)
    check_scores(head, returned, stored, allowed)
    assert both[: len(stored["x_adv"])].sum() > 7
    assert differing_pixels(returned, stored["x_adv"]).mean() <= allowed["pix_frac_mean"]
    # Nothing is spent on targets after the first success.
    clean_wrong = np.argmax(model(head)(images), axis=1) != labels
    np.testing.assert_array_equal(result.backward_passes[clean_wrong], 0)
    target = np.argmax(stored["success_per_target"], axis=0)
    target[~stored["success_per_target"].any(axis=0)] = 8
    expected = np.where(clean_wrong, 0, 101 * (target + 1))
    assert np.sum(result.backward_passes != expected) <= 1
