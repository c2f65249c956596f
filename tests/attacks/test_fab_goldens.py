"""FAB and FAB-T against AutoAttack's stored outputs, sample by sample.

Where two ways to the boundary are equally short, rounding decides which one FAB takes. The stored
outputs are those of a float32 network on another CPU, and the code that made them does not
give all of them again on this one (`docs/research/attacks.md` has the figures). So flags, losses,
distances and pixels are compared twice, with the network in float32 and in float64. For every
image that differs there is a proof that rounding is the reason; either

- the stored image is not that of its own probe (the same code, the network in float64), and our
  distance is the probe's; or
- our float32 attack does arrive at the stored image when half a unit in the last place is added to
  or taken from the pixels of the clean image.
"""

import functools
from typing import Any, NamedTuple

import fab_reference
import golden_models
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.fab import FAB, FABT
from he_keras.attacks.framework.result import other_classes

pytestmark = pytest.mark.slow

EPSILONS = {"linf": golden_models.EPSILON, "l2": 0.5}
NUM_TARGETS = 9
#: README: pixels that differ by more than this count.
PIXEL_TOLERANCE = 1e-5
#: Relative difference of a stored distance and its probe from which a sample is unsettled.
SETTLED = 1e-4
#: How often a clean image is moved to see where rounding leads.
NUM_MOVES = 32
#: Half a unit in the last place of float32 numbers in 0.5 to 1.
MOVE = 2.0**-24
CASES = [
    (head, norm, name)
    for head in golden_models.HEADS
    for norm in EPSILONS
    for name in ("fab", "fab_t")
]
all_cases = pytest.mark.parametrize(("head", "norm", "name"), CASES)
targeted_cases = pytest.mark.parametrize(("head", "norm"), [case[:2] for case in CASES[::2]])
precisions = pytest.mark.parametrize("precision", ["float32", "float64"])


class Found(NamedTuple):
    """What our attack finds: `per_target` are the distances of FAB-T, `(targets, 64)`."""

    x_nearest: Any
    distance: Any
    per_target: Any = None


@functools.cache
def model(head, precision="float32"):
    if precision == "float64":
        return fab_reference.float64_classifier(head)
    return golden_models.classifier(head)


def stored_outputs(head, norm, name):
    """Stored fields and tolerances of "fab" or "fab_t"."""
    block, key = ("fab", name) if norm == "linf" else ("l2", f"{name}_l2")
    return golden_models.outputs(block, head, key), golden_models.tolerances(head, key)


@functools.cache
def found(head, norm, name, precision="float32"):
    """The attack on all 64 images; FAB-T runs every target on every right image, as the stored."""
    x, y = golden_models.images().astype(precision), golden_models.labels()
    attack = FAB(he.ThreatModel(norm, EPSILONS[norm]))
    if name == "fab":
        result = attack(model(head, precision), x, y)
        return Found(result.x_nearest, result.distance)
    stored, _ = stored_outputs(head, norm, name)
    right = stored["dist"] > 0
    victim = Victim(model(head, precision))
    targets = other_classes(victim.logits(tf.constant(x[right])), y[right], NUM_TARGETS).numpy().T
    np.testing.assert_array_equal(targets, stored["y_target"][:, right])

    search = tf.function(
        lambda batch, truth, target: attack.search(victim, batch, truth, batch, target)
    )
    repeated = np.tile(x[right], (NUM_TARGETS, 1, 1, 1))
    crafted = search(repeated, np.tile(y[right], NUM_TARGETS).astype(np.int32), targets.reshape(-1))
    per_target = np.zeros((NUM_TARGETS, len(y)))
    per_target[:, right] = crafted.distance.numpy().reshape(NUM_TARGETS, -1)
    x_nearest = x.copy()
    x_adv = crafted.x_adv.numpy().reshape(NUM_TARGETS, -1, *x.shape[1:])
    x_nearest[right] = x_adv[per_target[:, right].argmin(axis=0), np.arange(np.sum(right))]
    return Found(x_nearest, per_target.min(axis=0), per_target)


def pixel_shares(x_nearest, x_adv):
    """Share of the values of each image that differ from the stored image."""
    return np.mean(np.abs(x_nearest - x_adv) > PIXEL_TOLERANCE, axis=(-3, -2, -1))


def settled(stored, allowed):
    """True for the samples whose stored output is that of its probe, which has other rounding."""
    with np.errstate(invalid="ignore"):
        error = np.abs(stored["dist"] - stored["probe_dist"]) / stored["probe_dist"]
    same = ~(error > SETTLED)
    # Pixels of the probe were compared for FAB only.
    if "probe_pixdiff_frac" in stored:
        same &= stored["probe_pixdiff_frac"] <= allowed["pix_frac_mean"]
    return same


@functools.cache
def images_off(head, norm, name, precision):
    """Numbers of the stored images that our attack does not find; all others are checked here."""
    stored, allowed = stored_outputs(head, norm, name)
    share = pixel_shares(
        found(head, norm, name, precision).x_nearest[: len(stored["x_adv"])], stored["x_adv"]
    )
    off = share > allowed["pix_frac_mean"]
    assert share[~off].mean() <= allowed["pix_frac_mean"]
    return np.flatnonzero(off)


def is_where_the_probe_is(head, norm, name, precision, number):
    """True where the stored output is not that of its probe, and our distance is the probe's."""
    stored, allowed = stored_outputs(head, norm, name)
    distance = found(head, norm, name, precision).distance[number]
    error = abs(distance / stored["probe_dist"][number] - 1)
    return error < SETTLED and not settled(stored, allowed)[number]


def share_of_moves_that_arrive(head, norm, name, number):
    """How often float32 FAB arrives at the stored image from slightly moved clean images."""
    stored, allowed = stored_outputs(head, norm, name)
    image = golden_models.images()[number]
    signs = np.random.default_rng(int(number)).choice([-1, 1], size=(NUM_MOVES, *image.shape))
    moved = np.clip(image + MOVE * signs, 0, 1).astype(np.float32)
    attack = {"fab": FAB, "fab_t": FABT}[name](he.ThreatModel(norm, EPSILONS[norm]))
    result = attack(model(head), moved, np.repeat(golden_models.labels()[number], NUM_MOVES))
    share = pixel_shares(result.x_nearest, stored["x_adv"][number])
    return np.mean(share <= allowed["pix_frac_mean"])


def check_distances(distance, stored, probe, tolerance):
    """Compares distances, closely where the reference itself does not depend on rounding."""
    np.testing.assert_array_equal(np.isfinite(distance), np.isfinite(stored))
    compared = np.isfinite(stored) & (stored > 0)
    distance, stored, probe = distance[compared], stored[compared], probe[compared]
    error = np.abs(distance / stored - 1)
    stable = np.abs(probe / stored - 1) < SETTLED
    assert stable.mean() > 0.9
    assert np.quantile(error[stable], 0.95) < tolerance
    assert np.median(error) < 1e-5
    # An unsettled example ends in another place, but not much farther away.
    assert np.mean(error > 5e-3) <= 0.01


@precisions
@all_cases
def test_flags_losses_and_distances_are_the_stored_ones(head, norm, name, precision):
    stored, allowed = stored_outputs(head, norm, name)
    ours = found(head, norm, name, precision)
    check_distances(ours.distance, stored["dist"], stored["probe_dist"], allowed["dist_rel_p95"])
    truth = golden_models.labels()
    logits = golden_models.float64_logits(head, ours.x_nearest)
    np.testing.assert_array_equal(logits.argmax(axis=1) != truth, stored["success"])
    error = np.abs(golden_models.cross_entropy(logits, truth) - stored["ce"])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    within = (logits.argmax(axis=1) != truth) & (ours.distance <= EPSILONS[norm])
    np.testing.assert_array_equal(within, stored["flag_within_eps"])


@precisions
@targeted_cases
def test_the_distances_of_every_target_are_the_stored_ones(head, norm, precision):
    stored, allowed = stored_outputs(head, norm, "fab_t")
    right = stored["dist"] > 0
    check_distances(
        found(head, norm, "fab_t", precision).per_target[:, right],
        stored["dist_per_target"][:, right],
        stored["probe_dist_per_target"][:, right],
        allowed["dist_rel_p95"],
    )


@all_cases
def test_a_float32_image_that_differs_is_decided_by_rounding(head, norm, name):
    case = head, norm, name
    off = images_off(*case, "float32")
    # None to three of 32 were seen; which ones depends on the CPU and on the batch size.
    assert len(off) <= 5
    for number in off:
        if not is_where_the_probe_is(*case, "float32", number):
            assert share_of_moves_that_arrive(*case, number) > 0, number


def test_in_float64_more_than_99_percent_of_the_images_are_the_stored_ones_or_the_probes():
    """The remaining one: a ReLU at its kink moves ten values of it, by at most 1.6e-5."""
    off = [(*case, number) for case in CASES for number in images_off(*case, "float64")]
    assert len(off) <= 6
    others = [
        (*case, number)
        for *case, number in off
        if not is_where_the_probe_is(*case, "float64", number)
    ]
    assert len(others) <= 0.01 * 32 * len(CASES)
    for exception in others:
        assert share_of_moves_that_arrive(*exception) > 0, exception


def test_99_percent_of_the_stored_images_are_found_in_float32_or_in_float64():
    """The remaining one, number 14 of FAB-T in linf, is one that the stored probe leaves too."""
    missed = [
        number
        for case in CASES
        for number in np.intersect1d(images_off(*case, "float32"), images_off(*case, "float64"))
    ]
    assert len(missed) <= 0.01 * 32 * len(CASES)


@targeted_cases
def test_fab_t_that_stops_early_gives_the_stored_verdicts(head, norm):
    stored, _ = stored_outputs(head, norm, "fab_t")
    x, y = golden_models.images(), golden_models.labels()
    attack = FABT(he.ThreatModel(norm, EPSILONS[norm]), stop_when_broken=True)
    result = attack(model(head), x, y)
    np.testing.assert_array_equal(result.success, stored["official_perturb_success"])
    broken = result.success & (result.backward_passes > 0)
    assert np.all(result.distance[broken] <= EPSILONS[norm])
    assert np.all(result.backward_passes[~result.success] == 100 * NUM_TARGETS)
    assert np.all(result.backward_passes[broken] < 100 * NUM_TARGETS)


@pytest.mark.parametrize("head", golden_models.HEADS)
def test_in_float64_only_the_rounding_of_the_reference_is_left(head):
    stored, _ = stored_outputs(head, "l2", "fab")
    result = found(head, "l2", "fab", "float64")
    assert result.x_nearest.dtype == np.float64
    right = result.distance > 0
    error = np.abs(result.distance[right] / stored["probe_dist"][right] - 1)
    # The loop around the stored float64 network is in float32; between the two networks its
    # distances differ by 1.2e-5.
    assert np.quantile(error, 0.95) < 1e-5 and error.max() < 1e-4
