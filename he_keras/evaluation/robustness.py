"""Robust accuracy under several attacks, and the per-example worst case over all of them.

Every example counts, clean mistakes included. Each number is the share of *all* examples that are
still classified correctly. A verdict counts when the recorded image, scored once more, shows it.

Example:
    >>> import he_keras as he, numpy as np, tensorflow as tf
    >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
    >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
    >>> report = he.evaluate_robustness(
    ...     logits, (images, np.array([0, 0])), he.ThreatModel("linf", 0.1), ["fgsm"], checks=False)
    >>> report.clean_accuracy, report.worst_case
    (1.0, 0.5)
"""

import contextlib
import dataclasses
import pathlib
from typing import Any

import numpy as np

from he_keras.atomic_files import make_writable
from he_keras.attacks import Attack, Victim, get
from he_keras.attacks.checks import check_choice, check_flag
from he_keras.evaluation.attack_runs import MODES, SAMPLE_SIZE, AttackRuns, parts
from he_keras.evaluation.check import Check
from he_keras.evaluation.examples import Clean, Examples, classify
from he_keras.evaluation.fingerprint import settings_of
from he_keras.evaluation.he_panel import has_run, panel_attacks, panel_of
from he_keras.evaluation.journal import FOLDER, Journal, locked
from he_keras.evaluation.preflight import preflight
from he_keras.evaluation.progress import Progress
from he_keras.evaluation.report_data import RESERVED, RobustnessReport, summarize, write_report
from he_keras.evaluation.sanity import epsilon_curve, sanity_checks
from he_keras.evaluation.scoring import Scorer
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import ThreatModel

_SCALE_FREE_ATTACK = "cw-linf-20"
_SCALE_FREE_LOSSES = ("cw", "dlr", "dlr-targeted")
#: A block holds so many examples or one batch, whatever is more.
_BLOCK_SIZE = 1000
_CHECKED_EXAMPLES = 64
_PANEL_EXAMPLES = 200
#: Checks whose failure means that the question is wrong, not that the model is weak; a failure of
#: the last may be explained by one before it.
_STOPPING = ("input-range", "epsilon-units", "label-order", "clean-accuracy")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What was asked for, checked; the arguments of `evaluate_robustness`."""

    model: Any
    examples: Examples
    threat: ThreatModel
    attacks: list[Attack]
    folder: pathlib.Path | None
    mode: str
    checks: bool
    shard: tuple[int, int] | None
    merge: bool
    protocol: str | None
    show_progress: bool

    @property
    def batch_size(self) -> int:
        return self.examples.batch_size


def evaluate_robustness(
    model,
    examples,
    threat: ThreatModel,
    attacks=("pgd-20", "cw-linf-20"),
    output_dir=None,
    batch_size: int = 250,
    mode: str = "survivors",
    checks: bool = True,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    protocol: str | None = None,
    show_progress: bool = False,
    **options,
) -> RobustnessReport:
    """Attacks every example; what was killed goes on in `output_dir` to the same verdicts.

    Adds an attack on the margin where all others are cross-entropy at another scale than the
    model's. `docs/evaluation.md` explains the arguments at length.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: two arrays (images, labels), a data set, or a `tf.data.Dataset` of such batches.
        threat: the threat model.
        attacks: attacks, by name or as `Attack` objects.
        output_dir: folder for the report's files and the adversarial images; None for none.
        batch_size: examples per compiled call.
        mode: "survivors": each attack on what all before it left; "individual": on every example.
        checks: run the checks and, for cosine heads, the panel of losses and scales.
        shard: `(i, n)` attacks only the i-th of n parts and writes no report.
        merge: attack nothing, take every batch from `output_dir`, where all shards must be.
        protocol: text for the report's headline.
        show_progress: show a progress bar with the running robust accuracy.
        **options: for attacks given by name: `step_size`, `logit_scale`, ...
    """
    chosen = _chosen(attacks, threat, batch_size, options)
    _check_plan(mode, shard, merge, output_dir)
    checked = Examples(threat, examples, batch_size)
    folder = make_writable(pathlib.Path(output_dir), "the report") if output_dir else None
    switches = (mode, checks, shard, merge, protocol, show_progress)
    plan = _Plan(model, checked, threat, chosen, folder, *switches)
    with locked(folder, shard) if folder else contextlib.nullcontext():
        return _evaluate(plan)


def _evaluate(plan: _Plan) -> RobustnessReport:
    scorer = Scorer(plan.model)
    clean = classify(scorer, plan.examples)
    sample = plan.examples.first(SAMPLE_SIZE)
    for attack in plan.attacks:
        attack.check_model(plan.model, *sample)
        for part in parts(attack):
            part.prepare(*sample)
    before = _checked_before(plan, sample) if plan.checks else ()
    settings = settings_of(plan.model, clean, plan.attacks, plan.threat, plan.mode, plan.batch_size)
    journal = Journal(plan.folder / FOLDER if plan.folder else None, settings, plan.merge)
    runs = AttackRuns(plan.attacks, plan.model, scorer, clean, plan.mode, plan.batch_size, journal)
    # Merging reads, and is done at once.
    show_progress = plan.show_progress and not plan.merge
    positions = attack_blocks(runs, plan.examples, plan.shard, show_progress)
    names = plan.examples.class_names
    report = summarize(runs, positions, sample, plan.threat, names, plan.protocol)
    if plan.shard is None and plan.checks:
        report = _scrutinized(plan, report, runs, clean, sample, before)
    if plan.shard is None and plan.folder is not None:
        write_report(report, runs, plan.examples, settings, plan.folder)
    return report


def attack_blocks(runs: AttackRuns, examples: Examples, shard, show_progress: bool) -> np.ndarray:
    """Attacks the blocks of a shard, or all; returns the positions of their examples."""
    block_size = max(_BLOCK_SIZE // runs.batch_size, 1) * runs.batch_size
    count = len(runs.labels) // (shard[1] if shard else 1)
    progress = Progress(count, len(runs.attacks), show_progress)
    positions = [np.zeros(0, int)]
    for block in examples.blocks(block_size, shard):
        if not np.array_equal(block.labels, runs.labels[block.positions]):
            raise ValueError(
                "The data set has another order each time it is read; expected a tf.data.Dataset "
                "without shuffling; received other labels than in the first reading"
            )
        runs.attack(block, progress)
        progress.block_done(runs.unbroken[block.positions])
        positions.append(block.positions)
    progress.close()
    return np.concatenate(positions)


def _checked_before(plan: _Plan, sample) -> tuple[Check, ...]:
    """Checks model and data; raises a ValueError where any accuracy would be a silly number."""
    images, labels = sample
    found = preflight(plan.model, images, labels, plan.threat)
    failed = {check.name: check for check in found if check.verdict == "fail"}
    for name in _STOPPING:
        if name in failed:
            check = failed[name]
            raise ValueError(
                f"Model and data do not fit ({check.name}); expected the check to pass; received "
                f"{check.figure}. {check.message} (checks=False, --nochecks, attacks all the same)"
            )
    return found


def _scrutinized(
    plan: _Plan, report: RobustnessReport, runs: AttackRuns, clean: Clean, sample, before
) -> RobustnessReport:
    """Adds the checks, the curve over epsilon, and for cosine heads the panel."""
    images, labels = (column[:_CHECKED_EXAMPLES] for column in sample)
    curve = epsilon_curve(plan.model, images, labels, plan.threat)
    still_correct = {name: flags[: len(labels)] for name, flags in runs.correct.items()}
    after = sanity_checks(
        plan.model, images, labels, plan.threat, curve=curve, still_correct=still_correct
    )
    is_cosine = isinstance(Victim(plan.model).head, CosineHead)
    panel = _panel(plan, runs, clean, sample) if is_cosine else None
    return dataclasses.replace(
        report, checks=(*before, *after), epsilon_curve=curve, he_panel=panel
    )


def _panel(plan: _Plan, runs: AttackRuns, clean: Clean, sample) -> dict:
    """Runs the attacks of the panel on the first examples, recorded like all others."""
    images, labels = (column[:_PANEL_EXAMPLES] for column in sample)
    few, size = clean.first(len(labels)), plan.batch_size
    attacks = [each for each in panel_attacks(plan.threat, size) if not has_run(runs, each)]
    settings = settings_of(plan.model, few, attacks, plan.threat, "individual", size)
    journal = Journal(plan.folder / FOLDER / "he-panel" if plan.folder else None, settings)
    panel = AttackRuns(attacks, plan.model, runs.scorer, few, "individual", size, journal)
    examples = Examples(plan.threat, (images, labels), size)
    attack_blocks(panel, examples, None, plan.show_progress)
    return panel_of(panel, runs, len(labels))


def _check_plan(mode: str, shard, merge: bool, output_dir) -> None:
    check_choice("mode", mode, MODES)
    check_flag("merge", merge)
    if shard is not None:
        whole = len(shard) == 2 and all(isinstance(number, int) for number in shard)
        if not whole or not 0 <= shard[0] < shard[1]:
            raise ValueError(f"Invalid shard; expected (i, n), 0 <= i < n; received shard={shard}")
    if shard is not None and merge:
        raise ValueError("A shard cannot be merged; expected shard or merge; received both")
    if (shard is not None or merge) and output_dir is None:
        raise ValueError(
            "Shards meet in a folder; expected output_dir with shard or merge; received None"
        )


def _chosen(attacks, threat: ThreatModel, batch_size: int, options: dict) -> list[Attack]:
    """The attacks to run, with different names and one that ignores the scale of the logits."""
    chosen = resolve_attacks(attacks, threat, batch_size=batch_size, **options)
    chosen = _with_scale_free(chosen, threat, batch_size)
    names = [attack.name for attack in chosen]
    if len({*RESERVED, *names}) != len(names) + len(RESERVED):
        raise ValueError(
            "Attacks must have different names; expected no repeats, nor 'clean' or "
            f"another of {RESERVED}; received {names}"
        )
    return chosen


def resolve_attacks(attacks, threat: ThreatModel, **options) -> list[Attack]:
    """Builds the attacks that are given by name; `step_size` goes to those that have one to choose.

    FGSM has none: its step is epsilon.
    """
    if isinstance(attacks, str):
        raise TypeError(
            f"Invalid attacks; expected a sequence of names or Attack objects; received {attacks!r}"
        )
    step_size = options.pop("step_size", None)
    resolved = []
    for attack in attacks:
        if isinstance(attack, Attack):
            resolved.append(attack)
            continue
        built = get(attack, threat, **options)
        if step_size is not None and hasattr(built, "step_size") and built.name != "fgsm":
            built = get(attack, threat, step_size=step_size, **options)
        resolved.append(built)
    if not resolved:
        raise ValueError(f"No attacks; expected at least one; received attacks={attacks!r}")
    return resolved


def _with_scale_free(chosen: list[Attack], threat, batch_size: int) -> list[Attack]:
    # What is computed on another model says nothing about this one's gradients.
    single = [each for attack in chosen for each in parts(attack) if each.uses_gradient]
    losses = [getattr(attack, "loss", None) for attack in single]
    rescaled = any(
        attack.logit_scale != "model" and loss in ("ce", "kl")
        for attack, loss in zip(single, losses, strict=True)
    )
    if rescaled and not set(losses) & set(_SCALE_FREE_LOSSES):
        return [*chosen, get(_SCALE_FREE_ATTACK, threat, batch_size=batch_size)]
    return chosen
