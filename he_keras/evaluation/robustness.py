"""Robust accuracy under several attacks, and the per-example worst case over all of them.

Every example counts, clean mistakes included. Each number is the share of *all* examples that are
still classified correctly.
"""

import dataclasses
import json
import os
import pathlib
import time

import numpy as np
import tensorflow as tf

from he_keras import attacks
from he_keras.attacks import Attack
from he_keras.callbacks.exact_resume import write_npz
from he_keras.threat import ThreatModel


@dataclasses.dataclass(frozen=True)
class AttackRow:
    """One line of a report.

    Attributes:
        name: the attack.
        robust_accuracy: share of all examples still classified correctly under this attack.
        seconds: time spent.
        forward_passes: mean over all examples.
        backward_passes: mean over all examples.
        settings: the attack's configuration.
    """

    name: str
    robust_accuracy: float
    seconds: float
    forward_passes: float
    backward_passes: float
    settings: dict


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
        """Returns everything but the per-example flags as plain data."""
        return {
            "num_examples": self.num_examples,
            "clean_accuracy": self.clean_accuracy,
            "worst_case": self.worst_case,
            "threat": self.threat,
            "attacks": [dataclasses.asdict(row) for row in self.rows],
        }

    def table(self) -> str:
        """Returns the report as a text table."""
        lines = [f"{'attack':<24}{'accuracy':>10}{'seconds':>10}{'forward':>10}{'backward':>10}"]
        lines.append(f"{'(clean)':<24}{self.clean_accuracy:>10.2%}")
        for row in self.rows:
            lines.append(
                f"{row.name:<24}{row.robust_accuracy:>10.2%}{row.seconds:>10.1f}"
                f"{row.forward_passes:>10.1f}{row.backward_passes:>10.1f}"
            )
        lines.append(f"{'(worst case)':<24}{self.worst_case:>10.2%}   n = {self.num_examples}")
        return "\n".join(lines)


def evaluate_robustness(
    model,
    examples,
    threat: ThreatModel,
    attack_names=("pgd-20", "cw-linf-20"),
    output_dir=None,
    batch_size: int = 250,
    show_progress: bool = False,
    **options,
) -> RobustnessReport:
    """Attacks every example with every attack.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: a pair of arrays (images in the threat model's bounds, integer labels), or a data
            set with `as_float()`.
        threat: the threat model.
        attack_names: attacks, by name or as `Attack` objects.
        output_dir: folder for `report.json` and `per_example.npz`; None for none.
        batch_size: examples per compiled call.
        show_progress: show a progress bar with the running robust accuracy.
        **options: passed to attacks given by name, for example `step_size=0.003`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
        >>> report = he.evaluate_robustness(
        ...     logits, (images, np.array([0, 0])), he.ThreatModel("linf", 0.1), ["fgsm"])
        >>> report.clean_accuracy, report.worst_case
        (1.0, 0.5)
    """
    images, labels = examples.as_float() if hasattr(examples, "as_float") else examples
    images, labels = attacks.check_examples(threat, images, labels)
    chosen = [_resolve(each, threat, batch_size, options) for each in attack_names]
    names = [attack.name for attack in chosen]
    if len(set(names)) != len(names):
        raise ValueError(
            f"Attacks must have different names; expected no repeats; received {names}"
        )
    victim = attacks.Victim(model)
    correct = {"clean": _predictions(victim, images, batch_size) == labels}
    rows = []
    for attack in chosen:
        row, correct[attack.name] = _run(attack, model, images, labels, show_progress)
        rows.append(row)
    report = _summarise(threat, tuple(rows), correct)
    if output_dir is not None:
        _write(report, labels, pathlib.Path(output_dir))
    return report


def _summarise(threat, rows: tuple[AttackRow, ...], correct: dict) -> RobustnessReport:
    worst = np.all(list(correct.values()), axis=0)
    return RobustnessReport(
        num_examples=len(worst),
        clean_accuracy=float(correct["clean"].mean()),
        rows=rows,
        worst_case=float(worst.mean()),
        correct=correct,
        threat=threat.get_config(),
    )


def _resolve(attack, threat, batch_size, options) -> Attack:
    if isinstance(attack, Attack):
        return attack
    return attacks.get(attack, threat, **{"batch_size": batch_size, **options})


def _run(attack: Attack, model, images, labels, show_progress) -> tuple[AttackRow, np.ndarray]:
    began = time.monotonic()
    bar = _progress_bar(attack.name, len(images), show_progress)
    results = []
    for first in range(0, len(images), attack.batch_size):
        rows = slice(first, first + attack.batch_size)
        ids = np.arange(first, first + len(labels[rows]))
        results.append(attack(model, images[rows], labels[rows], example_ids=ids))
        if bar is not None:
            robust = np.mean([~flag for result in results for flag in result.success])
            bar.set_postfix(robust=f"{robust:.2%}", refresh=False)
            bar.update(len(ids))
    if bar is not None:
        bar.close()
    flags = ~np.concatenate([result.success for result in results])
    forward = np.concatenate([result.forward_passes for result in results])
    backward = np.concatenate([result.backward_passes for result in results])
    row = AttackRow(
        attack.name,
        float(flags.mean()),
        round(time.monotonic() - began, 2),
        float(forward.mean()),
        float(backward.mean()),
        attack.get_config(),
    )
    return row, flags


def _progress_bar(name, total, show):
    if not show:
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit="image", dynamic_ncols=True, mininterval=1.0)


def _predictions(victim, images, batch_size) -> np.ndarray:
    predict = tf.function(
        lambda batch: tf.argmax(victim.logits(batch), axis=-1),
        input_signature=[tf.TensorSpec([None, *images.shape[1:]], images.dtype)],
    )
    batches = range(0, len(images), batch_size)
    return np.concatenate([predict(tf.constant(images[i : i + batch_size])) for i in batches])


def _write(report: RobustnessReport, labels, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "report.json.partial"
    temporary.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    os.replace(temporary, folder / "report.json")
    write_npz(folder / "per_example.npz", {"labels": labels, **report.correct})
