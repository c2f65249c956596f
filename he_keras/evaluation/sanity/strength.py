"""Checks whether the iterated attack is at its limit: more work must not find more.

Papers: Carlini et al. 2019, "On evaluating adversarial robustness" (iterated against single step,
more steps, restarts); Pintor et al. 2022, "Indicators of attack failure" (plateaued loss, silent
success).
"""

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.evaluation.check import Check
from he_keras.evaluation.sanity.sample import Sample, points, skipped, surplus_check

_GAIN = 0.005
_NUM_RESTARTS = 2
_LATE_SHARE = 0.05
#: An odd number, so that examples meet other neighbours than in the attack.
_RESCORED_BATCH = 37
_TIE = 1e-4
_TOO_FAR = 1.0 + 1e-4


def strength_checks(sample: Sample) -> tuple[Check, ...]:
    """Returns the checks that compare the iterated attack with less and with more of itself."""
    longer = _twice_the_steps(sample)
    return (
        _single_step(sample),
        _more_steps(sample, longer.success),
        _plateaued_loss(sample, longer.margin),
        _more_restarts(sample),
    )


def _single_step(sample: Sample) -> Check:
    single = int(sample.run(sample.build("fgsm", loss="cw")).sum())
    iterated = int(sample.plain.sum())
    return surplus_check(
        "iterative-beats-single-step",
        single - iterated,
        sample,
        _GAIN,
        f"one step breaks {single} of {len(sample)}, {sample.num_steps} steps {iterated}",
        "Iterating finds at least what one step finds.",
        "One step breaks more than many, so gradients mislead the iterated attack: the loss "
        "surface is masked; use square-5000, transfer attacks and autoattack.",
    )


def _twice_the_steps(sample: Sample):
    """The same start and the same step size, so that only the length differs."""
    plain = sample.plain_attack
    options = {"step_size": plain.step_size} if hasattr(plain, "step_size") else {}
    sample.run(sample.ascent(steps=2 * sample.num_steps, **options))
    return sample.results[-1][1]


def _more_steps(sample: Sample, longer: np.ndarray) -> Check:
    gain = int(longer.sum()) - int(sample.plain.sum())
    return surplus_check(
        "more-steps",
        gain,
        sample,
        _GAIN,
        f"{points(gain, sample)} from {2 * sample.num_steps} steps instead of {sample.num_steps}",
        "Twice the steps find nothing more.",
        "Twice the steps break more, so short attacks overstate robustness: report attacks of at "
        "least 100 steps (autoattack).",
    )


def _plateaued_loss(sample: Sample, later: np.ndarray) -> Check:
    """Indicator I-3, on the margin of the examples that hold out.

    The best margin so far, rescaled from 1 at the image to 0 at the end of the longer attack, is
    what must have come to rest by the middle.
    """
    name = "plateaued-loss"
    clean = losses.margin(tf.constant(sample.logits), sample.labels).numpy()
    fall = clean - later
    rows = ~sample.plain & (fall > 0.0)
    if sample.plain.all():
        return skipped(name, "No example holds out against the attack.")
    if not rows.any():
        message = (
            "The attack did not lower a single margin: its gradients are useless (see "
            "zero-gradients and gradient-direction)."
        )
        return Check(name, "after", "fail", "no margin fell", message)
    late = float(((sample.plain_result.margin - later)[rows] / fall[rows]).mean())
    figure = f"{late:.1%} of the fall of the margin comes after {sample.num_steps} steps"
    if late <= _LATE_SHARE:
        message = "The loss has come to rest."
        return Check(name, "after", "pass", figure, message)
    return Check(
        name,
        "after",
        "warn",
        figure,
        "The attack had not converged when it stopped: report attacks of at least 100 steps, with "
        "a step size that is chosen for you (autoattack).",
    )


def _more_restarts(sample: Sample) -> Check:
    gained = 0
    left = np.flatnonzero(~sample.plain)
    for restart in range(1, _NUM_RESTARTS + 1):
        broken = sample.run(sample.plain_attack, left, restart)
        gained += int(broken.sum())
        left = left[~broken[left]]
    return surplus_check(
        "more-restarts",
        gained,
        sample,
        _GAIN,
        f"{points(gained, sample)} from {_NUM_RESTARTS} more starts",
        "Other starting points find nothing more.",
        "Other starting points break more, so one run overstates robustness: report an attack "
        "with several restarts or losses (autoattack).",
    )


def silent_success(sample: Sample) -> Check:
    """Scores every image that the attacks returned again, among other neighbours.

    Indicator I-4 looks for misclassified iterates that an attack forgot. Here an attack returns its
    best iterate, so that what is left to check is that the verdict on it holds.
    """
    wrong = total = 0
    for rows, result in sample.results:
        images, labels = result.x_adv[::-1], sample.labels[rows][::-1]
        margins = np.concatenate(
            [
                losses.margin(
                    sample.victim.logits(tf.constant(images[first : first + _RESCORED_BATCH])),
                    labels[first : first + _RESCORED_BATCH],
                ).numpy()
                for first in range(0, len(images), _RESCORED_BATCH)
            ]
        )
        # What lies on the decision boundary may fall to either side.
        decided = np.abs(margins) > _TIE * max(1.0, np.abs(sample.logits).max())
        differs = decided & ((margins < 0.0) != result.success[::-1])
        wrong += int((differs | _outside(sample, rows, result)[::-1]).sum())
        total += len(rows)
    figure = f"{wrong} of {total} verdicts differ when scored again"
    if not wrong:
        message = "Every verdict of the attacks holds when its image is scored again."
        return Check("silent-success", "after", "pass", figure, message)
    return Check(
        "silent-success",
        "after",
        "fail",
        figure,
        "Verdicts change when the same images are scored again: the model is random, or depends on "
        "the batch (see deterministic and batch-independence), and no accuracy is reproducible.",
    )


def _outside(sample: Sample, rows: np.ndarray, result) -> np.ndarray:
    """Which returned images lie outside the ball or the bounds."""
    low, high = sample.threat.bounds
    x_adv, images = result.x_adv, sample.images[rows]
    far = np.asarray(sample.threat.distance(tf.constant(x_adv), tf.constant(images)))
    illegal = ((x_adv < low) | (x_adv > high)).reshape(len(rows), -1).any(axis=1)
    return (far > _TOO_FAR * sample.threat.epsilon) | illegal
