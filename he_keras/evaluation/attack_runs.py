"""Runs attacks over a whole data set: an ensemble attack by attack, each on what is left."""

import dataclasses
import time

import numpy as np

from he_keras.attacks import Attack, Ensemble
from he_keras.evaluation.examples import Examples

#: Examples that attacks may look at before they begin.
SAMPLE_SIZE = 1000


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
        stages: for an ensemble one row for each of its attacks, whose robust accuracy is what was
            left after it.
        warnings: what the attack itself found that makes its result doubtful.
        note: what has to be said beside the result in any case.
    """

    name: str
    robust_accuracy: float
    seconds: float
    forward_passes: float
    backward_passes: float
    settings: dict
    stages: tuple["AttackRow", ...] = ()
    warnings: tuple[str, ...] = ()
    note: str = ""


def run_attack(
    attack: Attack, model, examples: Examples, sample, num_examples: int, show_progress: bool
) -> tuple[AttackRow, np.ndarray]:
    """Returns the attack's line of the report, and the flags "still correct".

    `sample` holds the first images and labels, which the attack may look at before it begins.
    """
    unbroken = np.ones(num_examples, bool)
    for each in getattr(attack, "components", (attack,)):
        each.prepare(*sample)
    if not isinstance(attack, Ensemble):
        return _run_stage(attack, model, examples, unbroken, show_progress), unbroken
    warnings = attack.warnings(model, *sample)
    stages = []
    for number, component in enumerate(attack.components):
        before = unbroken.sum()
        row = _run_stage(component, model, examples, unbroken, show_progress, attack.name)
        stages.append(row)
        warnings += attack.stage_warnings(number, int(before - unbroken.sum()), num_examples)
        if not unbroken.any():
            break
    row = AttackRow(
        name=attack.name,
        robust_accuracy=float(unbroken.mean()),
        seconds=round(sum(stage.seconds for stage in stages), 2),
        forward_passes=sum(stage.forward_passes for stage in stages),
        backward_passes=sum(stage.backward_passes for stage in stages),
        settings=attack.get_config(),
        stages=tuple(stages),
        warnings=tuple(warnings),
        note=attack.note,
    )
    return row, unbroken


def _run_stage(
    attack: Attack, model, examples: Examples, unbroken, show_progress: bool, ensemble: str = ""
) -> AttackRow:
    """Runs one attack on the unbroken examples, and updates `unbroken` in place."""
    began = time.monotonic()
    name = f"{ensemble}/{attack.name}" if ensemble else attack.name
    bar = _progress_bar(name, int(unbroken.sum()), show_progress)
    passes = np.zeros(2)
    done = 0
    for positions, images, labels in examples.chosen(unbroken.copy()):
        result = attack(model, images, labels, example_ids=positions)
        unbroken[positions] = ~result.success
        passes += result.forward_passes.sum(), result.backward_passes.sum()
        done += len(labels)
        if bar is not None:
            # A single attack knows only the examples it has seen, an ensemble those left over.
            share = unbroken.mean() if ensemble else unbroken[:done].mean()
            bar.set_postfix(robust=f"{share:.2%}", refresh=False)
            bar.update(len(labels))
    if bar is not None:
        bar.close()
    forward_passes, backward_passes = passes / len(unbroken)
    return AttackRow(
        name=attack.name,
        robust_accuracy=float(unbroken.mean()),
        seconds=round(time.monotonic() - began, 2),
        forward_passes=float(forward_passes),
        backward_passes=float(backward_passes),
        settings=attack.get_config(),
    )


def _progress_bar(name: str, total: int, show: bool):
    if not show:
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit="image", dynamic_ncols=True, mininterval=1.0)
