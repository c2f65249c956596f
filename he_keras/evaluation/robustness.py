"""Robust accuracy under several attacks, and the per-example worst case over all of them.

Every example counts, clean mistakes included. Each number is the share of *all* examples that are
still classified correctly. A verdict counts when the recorded image, scored once more, shows it.
"""

import contextlib
import dataclasses
import pathlib

import numpy as np

from he_keras.atomic_files import make_writable
from he_keras.attacks import Attack, Victim, get
from he_keras.attacks.checks import check_choice, check_flag
from he_keras.evaluation.attack_runs import MODES, SAMPLE_SIZE, AttackRuns, parts
from he_keras.evaluation.check import Check
from he_keras.evaluation.examples import Clean, Examples, classify
from he_keras.evaluation.fingerprint import settings_of
from he_keras.evaluation.he_panel import panel_attacks, panel_of
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
    """Attacks every example with every attack.

    With `output_dir`, every finished batch is recorded there: a call that was killed goes on where
    it was and ends with the same verdicts. A cross-entropy attack at a logit scale other than the
    model's own (the HE paper's protocol) says little about robustness: unless an attack on the
    margin is among `attacks`, one is added.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: a pair of arrays (images in the threat model's bounds, integer labels), a data set
            of `he_keras.data`, or a `tf.data.Dataset` of batches of such pairs.
        threat: the threat model.
        attacks: attacks, by name or as `Attack` objects.
        output_dir: folder for `report.json`, `report.html`, `per_example.npz`, `gallery.npz` and
            `adversarial/`; None for none.
        batch_size: examples per compiled call.
        mode: "survivors" runs each attack on what all before it left; "individual" on every example
            that is classified correctly, so that each row stands for itself.
        checks: run the checks of `docs/evaluation.md` and, for cosine heads, the panel of losses
            and scales; False is for development, and the report says so.
        shard: `(i, n)` attacks only the i-th of n parts and writes no report; `output_dir` may be
            shared, or the parts' `adversarial/` folders be copied together afterwards.
        merge: attack nothing, take every batch from `output_dir`, where all shards must be.
        protocol: text for the report's headline, such as the table whose settings these are.
        show_progress: show a progress bar with the running robust accuracy.
        **options: passed to attacks given by name, for example `step_size=0.003` (to those that
            have a step size; FGSM's is epsilon) or `logit_scale="unit"`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
        >>> report = he.evaluate_robustness(
        ...     logits, (images, np.array([0, 0])), he.ThreatModel("linf", 0.1), ["fgsm"],
        ...     checks=False)
        >>> report.clean_accuracy, report.worst_case
        (1.0, 0.5)
    """
    chosen = _chosen(attacks, threat, batch_size, options)
    _check_plan(mode, shard, merge, output_dir)
    checked = Examples(threat, examples, batch_size)
    folder = make_writable(pathlib.Path(output_dir), "the report") if output_dir else None
    with locked(folder, shard) if folder else contextlib.nullcontext():
        scorer = Scorer(model)
        clean = classify(scorer, checked)
        sample = checked.first(SAMPLE_SIZE)
        for attack in chosen:
            attack.check_model(model, *sample)
            for part in parts(attack):
                part.prepare(*sample)
        before = _checked_before(model, sample, threat) if checks else ()
        settings = settings_of(model, clean, chosen, threat, mode, batch_size)
        journal = Journal(folder / FOLDER if folder else None, settings, merge)
        runs = AttackRuns(chosen, model, scorer, clean, mode, batch_size, journal)
        positions = attack_blocks(runs, checked, shard, show_progress)
        report = summarize(runs, positions, sample, threat, checked.class_names, protocol)
        if shard is None and checks:
            report = _scrutinized(report, runs, clean, sample, threat, folder, show_progress)
            report = dataclasses.replace(report, checks=(*before, *report.checks))
        if shard is None and folder is not None:
            write_report(report, runs, checked, settings, folder)
    return report


def attack_blocks(runs: AttackRuns, examples: Examples, shard, show_progress: bool) -> np.ndarray:
    """Attacks the blocks of a shard, or all; returns the positions of their examples."""
    block_size = max(_BLOCK_SIZE // runs.batch_size, 1) * runs.batch_size
    count = len(runs.labels) // (shard[1] if shard else 1)
    progress = Progress(count, len(runs.attacks), show_progress)
    positions = [np.zeros(0, int)]
    for block in examples.blocks(block_size, shard):
        runs.attack(block, progress)
        progress.block_done(runs.unbroken[block.positions])
        positions.append(block.positions)
    progress.close()
    return np.concatenate(positions)


def _checked_before(model, sample, threat: ThreatModel) -> tuple[Check, ...]:
    """Checks model and data; raises a ValueError where any accuracy would be a silly number."""
    images, labels = sample
    found = preflight(model, images, labels, threat)
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
    report: RobustnessReport, runs: AttackRuns, clean: Clean, sample, threat, folder, show_progress
) -> RobustnessReport:
    """Adds the checks, the curve over epsilon, and for cosine heads the panel."""
    images, labels = sample
    few = slice(_CHECKED_EXAMPLES)
    curve = epsilon_curve(runs.model, images[few], labels[few], threat)
    still_correct = {name: flags[few] for name, flags in runs.correct.items()}
    checks = sanity_checks(
        runs.model, images[few], labels[few], threat, curve=curve, still_correct=still_correct
    )
    panel = None
    if isinstance(Victim(runs.model).head, CosineHead):
        panel = _panel(runs, clean, sample, threat, folder, show_progress)
    return dataclasses.replace(report, checks=checks, epsilon_curve=curve, he_panel=panel)


def _panel(runs: AttackRuns, clean: Clean, sample, threat, folder, show_progress) -> dict:
    """Runs the attacks of the panel on the first examples, recorded like all others."""
    images, labels = (column[:_PANEL_EXAMPLES] for column in sample)
    few = clean.first(len(labels))
    attacks = panel_attacks(threat, runs.batch_size)
    settings = settings_of(runs.model, few, attacks, threat, "individual", runs.batch_size)
    journal = Journal(folder / FOLDER / "he-panel" if folder else None, settings)
    panel = AttackRuns(
        attacks, runs.model, runs.scorer, few, "individual", runs.batch_size, journal
    )
    examples = Examples(threat, (images, labels), runs.batch_size)
    attack_blocks(panel, examples, None, show_progress)
    return panel_of(panel, sample, len(labels))


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
