"""Robust accuracy under several attacks, and the per-example worst case over all of them.

Every example counts, clean mistakes included. Each number is the share of *all* examples that are
still classified correctly.
"""

import dataclasses
import pathlib

import numpy as np

from he_keras.atomic_files import make_writable, write_json
from he_keras.attacks import Attack, Victim, get
from he_keras.callbacks.exact_resume import write_npz
from he_keras.environment import environment
from he_keras.evaluation.attack_runs import SAMPLE_SIZE, AttackRow, run_attack
from he_keras.evaluation.examples import Examples, classify
from he_keras.threat import ThreatModel

_SCALE_FREE_ATTACK = "cw-linf-20"
_SCALE_FREE_LOSSES = ("cw", "dlr", "dlr-targeted")


@dataclasses.dataclass(frozen=True)
class RobustnessReport:
    """The result of `evaluate_robustness`.

    Attributes:
        num_examples: how many examples were scored.
        clean_accuracy: share classified correctly without attack.
        rows: one entry for each attack.
        worst_case: share that no attack broke.
        correct: per-example flags "still correct": "clean" and one entry for each attack.
        threat: the threat model's configuration.
    """

    num_examples: int
    clean_accuracy: float
    rows: tuple[AttackRow, ...]
    worst_case: float
    correct: dict[str, np.ndarray]
    threat: dict

    def to_json(self) -> dict:
        """Returns everything but the per-example flags, and the versions, as plain data."""
        return {
            "num_examples": self.num_examples,
            "clean_accuracy": self.clean_accuracy,
            "worst_case": self.worst_case,
            "threat": self.threat,
            "attacks": [dataclasses.asdict(row) for row in self.rows],
            "environment": environment(),
        }

    def table(self) -> str:
        """Returns the report as a text table."""
        shown = [(name, row) for row in self.rows for name, row in _named(row)]
        width = max(24, *(len(name) + 1 for name, _ in shown))
        lines = [
            f"{'attack':<{width}}{'accuracy':>10}{'seconds':>10}{'forward':>10}{'backward':>10}",
            f"{'(clean)':<{width}}{self.clean_accuracy:>10.2%}",
        ]
        for name, row in shown:
            lines.append(
                f"{name:<{width}}{row.robust_accuracy:>10.2%}{row.seconds:>10.1f}"
                f"{row.forward_passes:>10.1f}{row.backward_passes:>10.1f}"
            )
        lines.append(f"{'(worst case)':<{width}}{self.worst_case:>10.2%}   n = {self.num_examples}")
        lines += [f"note ({row.name}): {row.note}" for row in self.rows if row.note]
        lines += [f"WARNING ({row.name}): {text}" for row in self.rows for text in row.warnings]
        return "\n".join(lines)


def _named(row: AttackRow) -> list[tuple[str, AttackRow]]:
    """A row and those of its stages, with the names that the table shows."""
    scale = row.settings.get("logit_scale", "model")
    name = row.name if scale == "model" else f"{row.name} [scale {scale}]"
    return [(f"  {stage.name}", stage) for stage in row.stages] + [(name, row)]


def evaluate_robustness(
    model,
    examples,
    threat: ThreatModel,
    attacks=("pgd-20", "cw-linf-20"),
    output_dir=None,
    batch_size: int = 250,
    show_progress: bool = False,
    **options,
) -> RobustnessReport:
    """Attacks every example with every attack.

    A cross-entropy attack at a logit scale other than the model's own (the HE paper's protocol)
    says little about robustness: unless an attack on the margin is among `attacks`, one is added.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: a pair of arrays (images in the threat model's bounds, integer labels), a data set
            of `he_keras.data`, or a `tf.data.Dataset` of batches of such pairs.
        threat: the threat model.
        attacks: attacks, by name or as `Attack` objects.
        output_dir: folder for `report.json` and `per_example.npz`; None for none.
        batch_size: examples per compiled call.
        show_progress: show a progress bar with the running robust accuracy.
        **options: passed to attacks given by name, for example `step_size=0.003` (to those that
            have a step size; FGSM's is epsilon) or `logit_scale="unit"`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
        >>> report = he.evaluate_robustness(
        ...     logits, (images, np.array([0, 0])), he.ThreatModel("linf", 0.1), ["fgsm"])
        >>> report.clean_accuracy, report.worst_case
        (1.0, 0.5)
    """
    chosen = _chosen(attacks, threat, batch_size, options)
    checked = Examples(threat, examples, batch_size)
    folder = output_dir and make_writable(pathlib.Path(output_dir), "the report")
    labels, clean = classify(Victim(model), checked)
    rows, flags = _run_all(chosen, model, checked, len(labels), show_progress)
    report = _summary({"clean": clean, **flags}, rows, threat)
    _write(report, labels, folder)
    return report


def _run_all(chosen, model, examples: Examples, num_examples: int, show_progress: bool):
    """Checks every attack before the first begins; returns their rows, and flags by name."""
    sample = examples.first(SAMPLE_SIZE)
    for attack in chosen:
        attack.check_model(model, *sample)
    rows, flags = [], {}
    for attack in chosen:
        row, flags[attack.name] = run_attack(
            attack, model, examples, sample, num_examples, show_progress
        )
        rows.append(row)
    return rows, flags


def _chosen(attacks, threat: ThreatModel, batch_size: int, options: dict) -> list[Attack]:
    """The attacks to run, with different names and one that ignores the scale of the logits."""
    chosen = resolve_attacks(attacks, threat, batch_size=batch_size, **options)
    chosen = _with_scale_free(chosen, threat, batch_size)
    names = [attack.name for attack in chosen]
    if len({"clean", "labels", *names}) != len(names) + 2:
        raise ValueError(
            "Attacks must have different names; expected no repeats, nor 'clean' or 'labels'; "
            f"received {names}"
        )
    return chosen


def _summary(correct: dict, rows: list[AttackRow], threat: ThreatModel) -> RobustnessReport:
    return RobustnessReport(
        num_examples=len(correct["clean"]),
        clean_accuracy=float(correct["clean"].mean()),
        rows=tuple(rows),
        worst_case=float(np.all(list(correct.values()), axis=0).mean()),
        correct=correct,
        threat=threat.get_config(),
    )


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
    single = [each for attack in chosen for each in getattr(attack, "components", (attack,))]
    # What is computed on another model says nothing about this one's gradients.
    single = [attack for attack in single if attack.uses_gradient]
    losses = [getattr(attack, "loss", None) for attack in single]
    rescaled = any(
        attack.logit_scale != "model" and loss in ("ce", "kl")
        for attack, loss in zip(single, losses, strict=True)
    )
    if rescaled and not set(losses) & set(_SCALE_FREE_LOSSES):
        return [*chosen, get(_SCALE_FREE_ATTACK, threat, batch_size=batch_size)]
    return chosen


def _write(report: RobustnessReport, labels, folder: pathlib.Path | None) -> None:
    if folder is None:
        return
    write_json(folder / "report.json", report.to_json())
    write_npz(folder / "per_example.npz", {"labels": labels, **report.correct})
