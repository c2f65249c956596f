"""The table of all checks, and the two functions that run them.

Most published robustness that later fell had a cause that shows in a few passes over a few images.
The answers are no logits, or differ each time, or depend on the rest of the batch. The gradients
are missing, or say nothing about the loss. The inputs have another range than in training. These
checks run before the attacks. Those after the attacks are cheap experiments whose outcome is known
where model and attacks are sound.

A check is a function of a sample, and a row of the table. To add one, write both, and a section of
`docs/reference/checks.md`.

The checks after the attacks cost, for each example, up to about 240 forward and backward passes and
400 forward passes. Examples that break early cost fewer. Each of about 15 attacks takes half a
second to compile.

Papers: Croce & Hein 2020 (AutoAttack's checks of the model), Carlini et al. 2019 ("On evaluating
adversarial robustness"), Pintor et al. 2022 ("Indicators of attack failure").

Example:
    >>> from he_keras.evaluation.checks.table import CHECKS
    >>> [row.name for row in CHECKS if row.when == "before"][:3]
    ['finite', 'logits', 'deterministic']
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from he_keras.arguments import check_positive_integer
from he_keras.evaluation.checks import clean_images, gradients, planted, radii, strength
from he_keras.evaluation.checks.check import (
    AttackedSample,
    Check,
    CleanSample,
    Outcome,
    Sample,
    skipped,
)
from he_keras.status_line import StatusLine
from he_keras.threat import ThreatModel

#: Bounds the cost of the checks before the attacks.
_MAX_IMAGES = 128
#: Compiling a check takes about as long as so many passes of an image, on a small network.
_COMPILING = 10


class Row(NamedTuple):
    """One check.

    Attributes:
        name: of the check, and of its section in `docs/reference/checks.md`.
        when: "before" or "after" the attacks.
        needs: functions of the sample that say why it cannot be decided; nothing if it can.
        function: from the sample to the outcome.
        passes: of an image that holds out, as counted; the progress bar goes by them.
    """

    name: str
    when: str
    needs: tuple[Callable[[Any], str], ...]
    function: Callable[[Any], Outcome]
    passes: int = 0


REPEATABLE = (clean_images.repeatable_answers,)
GRADIENT = (gradients.a_gradient,)
ATTACKABLE = (gradients.an_attackable_model,)

#: In the order in which checks run and are reported. `frozen-state` alone runs after the others.
CHECKS = (
    Row("finite", "before", (), clean_images.finite),
    Row("logits", "before", (), clean_images.are_logits),
    Row("deterministic", "before", (), clean_images.deterministic, 5),
    Row("batch-independence", "before", REPEATABLE, clean_images.batch_independence, 4),
    Row("frozen-state", "before", (), clean_images.frozen_state),
    Row("differentiable", "before", (), gradients.differentiable, 4),
    Row("zero-gradients", "before", GRADIENT, gradients.zero_gradients),
    Row("gradient-direction", "before", GRADIENT + REPEATABLE, gradients.gradient_direction, 1),
    Row("noisy-loss-surface", "before", (), gradients.noisy_loss_surface, 12),
    Row("input-range", "before", (), clean_images.input_range),
    Row("epsilon-units", "before", (), clean_images.epsilon_units),
    Row("clean-accuracy", "before", (), clean_images.clean_accuracy, 4),
    Row("label-order", "before", (), clean_images.label_order),
    Row("enough-classes", "before", (), clean_images.enough_classes),
    Row("iterative-beats-single-step", "after", ATTACKABLE, strength.single_step, 47),
    Row("more-steps", "after", ATTACKABLE, strength.more_steps, 83),
    Row("plateaued-loss", "after", ATTACKABLE, strength.plateaued_loss),
    Row("more-restarts", "after", ATTACKABLE, strength.more_restarts, 85),
    Row("loss-gap", "after", ATTACKABLE, strength.loss_gap, 170),
    Row("logit-rescale", "after", ATTACKABLE, strength.logit_rescale),
    # From here on, what no gradient attack of the rows above has broken counts.
    Row(
        "transfer-without-head",
        "after",
        (*ATTACKABLE, strength.a_cosine_head),
        strength.transfer_without_head,
    ),
    Row("black-box", "after", (*ATTACKABLE, strength.pictures), strength.black_box, 204),
    Row("random-noise", "after", ATTACKABLE, strength.random_noise, 100),
    Row("monotone-in-epsilon", "after", ATTACKABLE, radii.monotone_in_epsilon),
    Row("half-range-attack", "after", ATTACKABLE, radii.half_range_attack, 13),
    Row("unbounded-attack", "after", ATTACKABLE, radii.unbounded_attack, 6),
    Row("silent-success", "after", ATTACKABLE, strength.silent_success, 10),
    Row("planted-adversarial", "after", ATTACKABLE, planted.planted_adversarial, 313),
    Row(
        "worst-case-holds",
        "after",
        (*ATTACKABLE, strength.results_of_an_evaluation),
        strength.worst_case_holds,
    ),
)


def preflight(
    model,
    images,
    labels,
    threat: ThreatModel,
    logit_scale: float | str = "model",
    show_progress: bool = False,
) -> tuple[Check, ...]:
    """Checks a model and its data before any attack.

    What is checked is the path that attacks take, see `he_keras.attacks.framework.agreement`. This
    costs about 1,000 forward passes of single images, and a hundred backward ones.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds; the first 128 are used.
        labels: integer labels.
        threat: the threat model.
        logit_scale: see `he_keras.attacks.Victim`.
        show_progress: show which check runs.

    Example:
        >>> import numpy as np, tensorflow as tf
        >>> import he_keras as he
        >>> from he_keras.evaluation.checks import preflight
        >>> images = np.random.default_rng(0).uniform(size=(32, 4)).astype("float32")
        >>> softmax = lambda images: tf.nn.softmax(images)
        >>> checks = preflight(softmax, images, images.argmax(1), he.ThreatModel("linf", 0.1))
        >>> [check.name for check in checks if check.verdict == "fail"]
        ['logits']
    """
    sample = CleanSample(model, images, labels, threat, logit_scale, _MAX_IMAGES)
    return _run("before", sample, show_progress)


def sanity_checks(
    model,
    images,
    labels,
    threat: ThreatModel,
    *,
    num_examples: int = 64,
    logit_scale: float | str = "model",
    seed: int = 0,
    curve: dict | None = None,
    still_correct: Mapping[str, np.ndarray] | None = None,
    show_progress: bool = False,
) -> tuple[Check, ...]:
    """Runs cheap experiments on a sample whose outcome is known if attacks and model are sound.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        num_examples: how many of the images to use, from the first.
        logit_scale: see `he_keras.attacks.Victim`.
        seed: seed of all draws.
        curve: result of `epsilon_curve`; None measures one.
        still_correct: flags for the same images that attacks left, by the name of the attack.
        show_progress: show which check runs.
    """
    check_positive_integer("num_examples", num_examples)
    images, labels = np.asarray(images)[:num_examples], np.asarray(labels)[:num_examples]
    sample = AttackedSample(
        model,
        images,
        labels,
        threat,
        logit_scale,
        seed=seed,
        curve=curve,
        still_correct=still_correct,
    )
    return _run("after", sample, show_progress)


def _run(when: str, sample: Sample, show_progress: bool) -> tuple[Check, ...]:
    rows = [row for row in CHECKS if row.when == when]
    # None of all the passes may have changed the model.
    in_order = sorted(rows, key=lambda row: row.function is clean_images.frozen_state)
    found: dict[str, Check] = {}
    with StatusLine(f"checks {when} the attacks", show_progress) as line:
        for number, row in enumerate(in_order):
            line.count(_work(in_order[:number]), _work(in_order), row.name)
            found[row.name] = run_check(row, sample)
        line.count(1, 1, f"{len(rows)} checks")
    return tuple(found[row.name] for row in rows)


def _work(rows: Sequence[Row]) -> int:
    """What some checks take, in passes; each also compiles a little."""
    return sum(row.passes + _COMPILING for row in rows)


def run_check(row: Row, sample: Sample) -> Check:
    """Runs one check on a sample, unless the sample lacks what the check needs."""
    missing = next((reason for reason in map(sample.once, row.needs) if reason), "")
    outcome = skipped(missing) if missing else sample.once(row.function)
    return Check(row.name, row.when, *outcome)
