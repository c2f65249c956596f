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
import math
import pathlib
from typing import Any

from he_keras.arguments import check_choice, check_flag
from he_keras.attacks import FGSM, Attack, Victim, get
from he_keras.attacks.framework.agreement import standing_still
from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.checks import epsilon_curve, preflight, sanity_checks
from he_keras.evaluation.checks.check import Check
from he_keras.evaluation.report import write_html
from he_keras.evaluation.report.robustness_report import (
    RESERVED,
    RobustnessReport,
    pictures_of_unbroken,
    summarize,
    write_report,
)
from he_keras.evaluation.run.attack_runs import (
    MODES,
    SAMPLE_SIZE,
    AttackRuns,
    missing_attacks,
    run_panel,
)
from he_keras.evaluation.run.cost import (
    Cost,
    CostPart,
    Probe,
    announcement,
    passes_of_checks,
    peak_memory,
)
from he_keras.evaluation.run.examples import Clean, Examples, Scorer, classify, positions_of
from he_keras.evaluation.run.facts import for_report, settings_of
from he_keras.evaluation.run.identity import claim, probes_of
from he_keras.evaluation.run.journal import FOLDER, Journal, locked
from he_keras.files import make_writable
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import ThreatModel, bounds_of

#: What runs unless other attacks are asked for, on the command line and in Python.
DEFAULT_ATTACKS = ("pgd-20", "adaptive-pgd-20", "cw-linf-20")
DEFAULT_MODE = "individual"
_SCALE_FREE_ATTACK = "cw-linf-20"
_SCALE_FREE_LOSSES = ("cw", "dlr", "dlr-targeted")
#: A block holds at most so many examples and bytes of images, or one batch if that is more.
_BLOCK_SIZE = 1000
_BLOCK_BYTES = 2**27
#: Bounds the cost: an example takes about 1,300 passes in the checks.
_CHECKED_EXAMPLES = 64
#: Bounds the cost: an example takes a whole AutoAttack in the panel.
_PANEL_EXAMPLES = 200
_CHECKS_FILE, _PANEL_FILE = "checks.json", "he-panel.json"
#: Checks whose failure means that model and data do not fit. The last one may fail for the reason
#: that an earlier one names, so the first failure is reported.
_STOPPING = ("input-range", "epsilon-units", "label-order", "clean-accuracy")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The checked arguments of `evaluate_robustness`."""

    model: Any
    examples: Examples
    threat: ThreatModel
    attacks: list[Attack]
    mode: str
    checks: str
    panel: str
    shard: tuple[int, int] | None
    merge: bool
    protocol: str | None = None
    training: dict | None = None
    show_progress: bool = False
    folder: pathlib.Path | None = None

    @property
    def batch_size(self) -> int:
        return self.examples.batch_size

    @property
    def runs_checks(self) -> bool:
        """Whether this process runs the checks if no other has; of shards the first does."""
        return self.checks == "run" and self.is_first

    @property
    def runs_panel(self) -> bool:
        """Whether this process runs the panel if no other has."""
        return self.panel == "run" and self.is_first

    @property
    def is_first(self) -> bool:
        """Whether this is the whole evaluation, or the first of its shards."""
        return self.shard is None or self.shard[0] == 0


def evaluate_robustness(
    model,
    examples,
    threat: ThreatModel,
    attacks=DEFAULT_ATTACKS,
    output_dir=None,
    batch_size: int = 250,
    mode: str = DEFAULT_MODE,
    checks: bool | None = None,
    panel: bool | None = None,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    protocol: str | None = None,
    training: dict | None = None,
    show_progress: bool = False,
    **options,
) -> RobustnessReport:
    """Attacks every example and takes the worst case, example by example.

    The same call goes on after an interruption. If all attacks use the cross-entropy at another
    scale than the model's, one on the margin is added. `docs/how-to/evaluate.md` has the details.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: two arrays (images, labels), a data set, or a `tf.data.Dataset` of such batches.
        threat: the threat model.
        attacks: attacks, by name or as `Attack` objects.
        output_dir: folder for the report's files and the adversarial images; None for none.
        batch_size: examples per compiled call.
        mode: "individual": each attack on every example; "survivors": on what all before it left.
        checks: run the checks; None runs them, but a merge reads what the first shard recorded.
        panel: run the panel of losses and scales, for cosine heads only; None as for the checks.
        shard: `(i, n)` attacks only the i-th of n parts and writes no report.
        merge: attack nothing, take everything from `output_dir`, where all shards must be.
        protocol: text for the report's headline.
        training: the configuration that the model was trained with, for the report.
        show_progress: show a progress bar with the running robust accuracy.
        **options: for attacks given by name: `step_size`, `logit_scale`, ...
    """
    bounds_of(model, threat.bounds)
    _check_plan(mode, shard, merge, output_dir)
    chosen = _chosen(attacks, threat, batch_size, options)
    asked: dict[str, Any] = {"checks": checks, "panel": panel, "shard": shard, "merge": merge}
    asked |= {"protocol": protocol, "training": training, "show_progress": show_progress}
    plan = _planned(model, Examples(threat, examples, batch_size), chosen, mode, **asked)
    if output_dir:
        folder = make_writable(pathlib.Path(output_dir), "the report")
        plan = dataclasses.replace(plan, folder=folder)
    with locked(folder, shard) if output_dir else contextlib.nullcontext(), standing_still():
        return _evaluate(plan)


def cost_of_evaluation(
    model,
    examples,
    threat: ThreatModel,
    attacks=DEFAULT_ATTACKS,
    batch_size: int = 250,
    mode: str = DEFAULT_MODE,
    checks: bool | None = None,
    panel: bool | None = None,
    shard: tuple[int, int] | None = None,
    **options,
) -> Cost:
    """Returns what `evaluate_robustness` with the same arguments will cost, and writes nothing.

    Short runs of the attacks on a few examples tell how fast this machine is, and how many examples
    will hold out. They take about half a minute, or longer for a large network.

    Example:
        >>> import he_keras as he, numpy as np
        >>> from he_keras.evaluation import cost_of_evaluation
        >>> images = np.random.default_rng(0).uniform(size=(40, 4)).astype("float32")
        >>> data, threat = (images, images.argmax(1)), he.ThreatModel("linf", 1e-4)
        >>> cost = cost_of_evaluation(lambda images: images, data, threat, ["pgd-20"], checks=False)
        >>> [(part.name, part.passes) for part in cost.parts]
        [('clean images', 40.0), ('pgd-20', 1640.0), ('compilation', 0.0)]
    """
    bounds_of(model, threat.bounds)
    _check_plan(mode, shard, merge=False, output_dir="none is written")
    chosen = _chosen(attacks, threat, batch_size, options)
    checked = Examples(threat, examples, batch_size)
    asked: dict[str, Any] = {"checks": checks, "panel": panel, "shard": shard}
    return _expected_cost(_planned(model, checked, chosen, mode, **asked))


def _expected_cost(plan: _Plan) -> Cost:
    facts = (plan.attacks, plan.mode, plan.threat, plan.batch_size)
    beside = missing_attacks(*facts) if plan.runs_panel else []
    images, labels = plan.examples.first(SAMPLE_SIZE)
    for attack in (*plan.attacks, *beside):
        attack.check_model(plan.model, images, labels)
        for part in parts(attack):
            part.prepare(images, labels)
    with standing_still():
        probe = Probe(plan.model, images, labels, [*plan.attacks, *beside], plan.batch_size)
    count = len(plan.examples) / (plan.shard[1] if plan.shard else 1)
    lines = [CostPart("clean images", count, count * probe.seconds_per_image)]
    left = count * probe.correct
    for attack in plan.attacks:
        lines.append(probe.cost_of(attack, left))
        left = left * probe.held if plan.mode == "survivors" else left
    for attack in beside:
        few = min(_PANEL_EXAMPLES, len(plan.examples)) * probe.correct
        lines.append(probe.cost_of(attack, few, f"panel: {attack.name}"))
    if plan.runs_checks:
        few = min(_CHECKED_EXAMPLES, len(plan.examples)) * probe.correct
        lines.append(probe.cost_of_checks(few))
    compiling = probe.seconds_to_compile([*plan.attacks, *beside])
    lines.append(CostPart("compilation", 0.0, compiling))
    note = (
        f"Short runs: {probe.correct:.0%} of the first images are right, {probe.held:.0%} of these "
        "hold out. Fewer survivors cost less."
    )
    return Cost("the evaluation", tuple(lines), peak_memory(), (note,))


def _planned(
    model, examples: Examples, attacks, mode: str, checks, panel, merge=False, **others
) -> _Plan:
    """Returns the plan of an evaluation, which has no folder yet."""
    panel = _run_read_or_no(_panel_argument(panel, checks, model), merge)
    checks = _run_read_or_no(checks, merge)
    facts = (model, examples, examples.threat, attacks, mode, checks, panel)
    return _Plan(*facts, merge=merge, **others)


def _evaluate(plan: _Plan) -> RobustnessReport:
    scorer = Scorer(plan.model)
    clean = classify(scorer, plan.examples, plan.show_progress and not plan.merge)
    sample = plan.examples.first(SAMPLE_SIZE)
    for attack in plan.attacks:
        attack.check_model(plan.model, *sample)
        for part in parts(attack):
            part.prepare(*sample)
    before = _checked_before(plan, sample) if plan.checks == "run" else ()
    settings, journal = _journal(plan, clean, sample)
    _announce(plan, clean, journal, settings["block_size"])
    runs = AttackRuns(plan.attacks, plan.model, scorer, clean, plan.mode, plan.batch_size, journal)
    # Merging reads, and is done at once.
    show_progress = plan.show_progress and not plan.merge
    block_size = settings["block_size"]
    positions = runs.attack_all(plan.examples, plan.shard, block_size, show_progress)
    names = plan.examples.class_names
    report = summarize(runs, positions, sample, plan.threat, names, plan.protocol, plan.training)
    report = _scrutinized(plan, report, runs, sample, before)
    report = _with_panel(plan, report, runs, clean, sample)
    if plan.folder is not None:
        pictures = pictures_of_unbroken(runs, plan.examples, plan.shard, plan.merge)
        if plan.shard is None:
            write_report(report, runs, plan.examples, settings, plan.folder, pictures)
            write_html(plan.folder)
    return report


def _announce(plan: _Plan, clean: Clean, journal: Journal, block_size: int) -> None:
    """Prints what the evaluation will cost; a merge costs nothing unless asked to run more."""
    runs_checks = plan.runs_checks and journal.recall_json(_CHECKS_FILE) is None
    runs_panel = plan.runs_panel and journal.recall_json(_PANEL_FILE) is None
    if not plan.show_progress or (plan.merge and not (runs_checks or runs_panel)):
        return
    # Images that are wrong from the start cost nothing. All others may hold to the end.
    correct, num_classes = ~clean.scored.wrong, clean.num_classes
    own = correct[positions_of(len(correct), block_size, plan.shard)]
    attacks = [] if plan.merge else plan.attacks
    asked = int(own.sum()) * sum(attack.most_passes(num_classes) for attack in attacks)
    beside = {}
    if runs_checks:
        beside["checks"] = passes_of_checks(int(correct[:_CHECKED_EXAMPLES].sum()))
    if runs_panel:
        rest = missing_attacks(attacks, plan.mode, plan.threat, plan.batch_size)
        for_one = sum(attack.most_passes(num_classes) for attack in rest)
        beside["panel"] = int(correct[:_PANEL_EXAMPLES].sum()) * for_one
    print(announcement(asked, beside))


def _journal(plan: _Plan, clean: Clean, sample) -> tuple[dict, Journal]:
    """Claims the folder; returns the settings that hold there, and the record."""
    images, size = sample[0], plan.batch_size
    block_size = block_size_of(len(clean.labels), size, images[0].nbytes, plan.shard)
    facts = (plan.model, clean, plan.attacks, plan.threat, plan.mode, size, block_size)
    settings = settings_of(*facts)
    if plan.folder is None:
        return settings, Journal(None)
    folder = plan.folder / FOLDER
    models = {"model": plan.model} | {
        f"substitute of {attack.name}": attack.substitute.model
        for attack in plan.attacks
        if hasattr(attack, "substitute")
    }
    claimed = claim(folder, settings, models, probes_of(images, plan.threat))
    made_with = for_report(claimed.settings)
    return claimed.settings, Journal(folder, made_with, plan.merge, claimed.tolerance)


def block_size_of(num_examples: int, batch_size: int, image_bytes: int, shard) -> int:
    """Returns how many examples are attacked together: so few that every shard gets its part.

    Example:
        >>> from he_keras.evaluation.robustness import block_size_of
        >>> block_size_of(1000, 250, 3072, None), block_size_of(1000, 250, 3072, (0, 8))
        (1000, 125)
    """
    most = min(_BLOCK_SIZE, _BLOCK_BYTES // image_bytes)
    most = max(most // batch_size, 1) * batch_size
    if shard is None:
        return most
    rounds = math.ceil(num_examples / (most * shard[1]))
    return math.ceil(num_examples / (rounds * shard[1]))


def _checked_before(plan: _Plan, sample) -> tuple[Check, ...]:
    """Checks model and data; raises a ValueError if any accuracy would be meaningless."""
    images, labels = sample
    found = preflight(plan.model, images, labels, plan.threat, show_progress=plan.show_progress)
    failed = {check.name: check for check in found if check.verdict == "fail"}
    for name in _STOPPING:
        if name in failed:
            check = failed[name]
            raise ValueError(
                f"Model and data do not fit ({check.name}); expected the check to pass; received "
                f"{check.figure}. {check.message} (checks=False, --nochecks, attacks all the same)"
            )
    return found


def _run_read_or_no(given: bool | None, merge: bool) -> str:
    """Returns "run", "read" to take what another process recorded, or "no"."""
    if given is None:
        return "read" if merge else "run"
    return "run" if given else "no"


def _panel_argument(panel: bool | None, checks: bool | None, model) -> bool | None:
    """Returns whether the panel runs, by default as the checks do; it needs a cosine head."""
    is_cosine = isinstance(Victim(model).head, CosineHead)
    if panel is None:
        return checks if is_cosine else False
    check_flag("panel", panel)
    if panel and not is_cosine:
        raise ValueError(
            "The panel compares scales of a cosine head; expected a model with a CosineHead; "
            "received panel=True and a model without one: leave panel (--panel) out"
        )
    return panel


def _scrutinized(
    plan: _Plan, report: RobustnessReport, runs: AttackRuns, sample, before
) -> RobustnessReport:
    """Adds the checks and the curve over epsilon."""
    found = runs.journal.recall_json(_CHECKS_FILE) if plan.checks != "no" else None
    if found is None and plan.runs_checks:
        images, labels = (column[:_CHECKED_EXAMPLES] for column in sample)
        curve = epsilon_curve(
            plan.model, images, labels, plan.threat, show_progress=plan.show_progress
        )
        # A small block may not have all of them.
        is_done = runs.done[: len(labels)].all()
        flags = {name: flags[: len(labels)] for name, flags in runs.correct.items() if is_done}
        given = (plan.model, images, labels, plan.threat)
        after = sanity_checks(
            *given, curve=curve, still_correct=flags, show_progress=plan.show_progress
        )
        plain = [dataclasses.asdict(check) for check in (*before, *after)]
        found = {"checks": plain, "epsilon_curve": curve}
        runs.journal.record_json(_CHECKS_FILE, found)
    if found is None:
        return report
    checks = tuple(Check(**each) for each in found["checks"])
    return dataclasses.replace(report, checks=checks, epsilon_curve=found["epsilon_curve"])


def _with_panel(
    plan: _Plan, report: RobustnessReport, runs: AttackRuns, clean: Clean, sample
) -> RobustnessReport:
    """Adds the panel of a cosine head."""
    found = runs.journal.recall_json(_PANEL_FILE) if plan.panel != "no" else None
    if found is None and plan.runs_panel:
        images, labels = (column[:_PANEL_EXAMPLES] for column in sample)
        folder = plan.folder / FOLDER if plan.folder else None
        found = run_panel(runs, clean, images, labels, folder, plan.show_progress)
        runs.journal.record_json(_PANEL_FILE, found)
    return dataclasses.replace(report, he_panel=found)


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
    """Builds the attacks that are given by name.

    `step_size` goes to those that have a step to choose. FGSM has none: its step is epsilon.
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
        if step_size is not None and hasattr(built, "step_size") and not isinstance(built, FGSM):
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
