"""Runs attacks over blocks of examples, and counts what they find and cost.

Every attack runs on a block before the next block begins. So a partial evaluation says already how
strong each attack is. What happens in one block depends on no other block.

The panel of a cosine head runs five attacks on the same images. They differ in scale and loss. The
HE paper's code attacks the cross-entropy at scale 1. That finds fewer adversarial images than the
same attack on the logits that are trained and exported. Attacks on the margin find more than both.
So no accuracy of a cosine head is shown without the others next to it.
"""

import dataclasses
import time
from typing import NamedTuple

import numpy as np

from he_keras.attacks import AdaptivePGD, Attack, Ensemble, ProjectedGradient, get
from he_keras.attacks.framework.agreement import agreed
from he_keras.attacks.framework.ensemble import parts
from he_keras.evaluation.run.examples import (
    Block,
    Clean,
    Examples,
    Scored,
    Scorer,
    positions_of,
)
from he_keras.evaluation.run.facts import stage_names
from he_keras.evaluation.run.journal import BatchOutcome, Journal
from he_keras.evaluation.run.progress import Progress
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    fewest_gains,
    resolution,
    share_of,
    wilson_interval,
)
from he_keras.threat import ThreatModel

#: Examples that attacks may look at before they begin.
SAMPLE_SIZE = 1000
MODES = ("survivors", "individual")
#: What each row of the panel tells, in the order of `panel_attacks`.
MEANINGS = (
    "cross-entropy on raw cosines: the HE paper's protocol, the softest",
    "cross-entropy on the logits that are trained and exported",
    "cross-entropy with scale and margin, the loss that training minimises",
    "margin of the logits: does not depend on their scale",
    "AutoAttack standard: the worst case over four attacks",
)
#: As in the HE paper's tables.
_PANEL_STEPS = 20


@dataclasses.dataclass(frozen=True)
class AttackRow:
    """One line of a report.

    Attributes:
        name: the attack.
        robust_accuracy: share of all examples still classified correctly: under this attack alone
            (mode "individual"), or under it and all before it (mode "survivors", and stages).
        interval: 95 % confidence interval of `robust_accuracy`.
        num_attacked: how many examples it was run on.
        num_broken: how many of them it broke.
        remaining: share of all examples that this attack and all before it left.
        seconds: time spent.
        forward_passes: mean over all examples.
        backward_passes: mean over all examples.
        median_distance: over the broken examples, in the threat model's norm; None without any.
        max_distance: the largest of the same distances; None without any.
        settings: the attack's configuration.
        stages: for an ensemble one row for each of its attacks.
        warnings: what the attack itself found that makes its result doubtful.
        note: what has to be said with the result in any case.
    """

    name: str
    robust_accuracy: float
    interval: tuple[float, float]
    num_attacked: int
    num_broken: int
    remaining: float
    seconds: float
    forward_passes: float
    backward_passes: float
    median_distance: float | None
    max_distance: float | None
    settings: dict
    stages: tuple["AttackRow", ...] = ()
    warnings: tuple[str, ...] = ()
    note: str = ""


class Worst(NamedTuple):
    """The strongest adversarial image of each example; arrays with one entry per example.

    Attributes:
        broken_by: number of the first attack that broke it; -1 if none did, -2 if it was wrong
            from the start.
        prediction: class predicted for that image; for all others the clean prediction.
        margin: that image's margin; for the unbroken the smallest that any attack reached.
        distance: length of that image's perturbation; 0 where the clean image has that margin.
        file_and_row: where the image is recorded, by position.
    """

    broken_by: np.ndarray
    prediction: np.ndarray
    margin: np.ndarray
    distance: np.ndarray
    file_and_row: dict


class _Tally:
    """Sums over the batches of one attack."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.num_attacked = self.num_broken = self.unconfirmed = self.non_finite = 0
        self.seconds = self.forward_passes = self.backward_passes = 0.0
        self.distances: list[np.ndarray] = []

    def add(self, outcome: BatchOutcome) -> None:
        self.num_attacked += len(outcome.broken)
        self.num_broken += int(outcome.broken.sum())
        self.unconfirmed += int(outcome.unconfirmed.sum())
        self.non_finite += int(outcome.non_finite.sum())
        self.seconds += float(outcome.seconds)
        self.forward_passes += float(outcome.forward_passes.sum())
        self.backward_passes += float(outcome.backward_passes.sum())
        self.distances.append(outcome.distance[outcome.broken])

    def row(
        self, left: tuple[int, int], num_examples: int, warnings=(), stages=(), note=""
    ) -> AttackRow:
        """Returns the line; `left` counts the examples right under this attack, and under all."""
        num_correct, num_remaining = left
        distances = np.concatenate(self.distances) if self.distances else np.zeros(0)
        return AttackRow(
            name=self.attack.name,
            robust_accuracy=share_of(num_correct, num_examples),
            interval=wilson_interval(num_correct, num_examples),
            num_attacked=self.num_attacked,
            num_broken=self.num_broken,
            remaining=share_of(num_remaining, num_examples),
            seconds=round(self.seconds, 2),
            forward_passes=share_of(self.forward_passes, num_examples),
            backward_passes=share_of(self.backward_passes, num_examples),
            median_distance=float(np.median(distances)) if len(distances) else None,
            max_distance=float(np.max(distances)) if len(distances) else None,
            settings=self.attack.get_config(),
            warnings=(*self._warnings(), *warnings),
            stages=tuple(stages),
            note=note,
        )

    def _warnings(self) -> list[str]:
        found = []
        if self.unconfirmed:
            found.append(
                f"{self.unconfirmed} successes were gone when the images were scored once more: "
                "the model is random, or its margins there are rounding errors; they do not count."
            )
        if self.non_finite:
            found.append(
                f"The model returned NaN or infinity for {self.non_finite} examples: repair it."
            )
        return found

    def merge(self, other: "_Tally") -> None:
        """Adds the sums of another attack on the same examples, which are counted only once."""
        self.num_broken += other.num_broken
        self.unconfirmed += other.unconfirmed
        self.non_finite += other.non_finite
        self.seconds += other.seconds
        self.forward_passes += other.forward_passes
        self.backward_passes += other.backward_passes
        self.distances += other.distances


class AttackRuns:
    """All attacks of one evaluation and what they have found so far.

    Args:
        attacks: in order; an ensemble's components run on its own survivors.
        model: the model.
        scorer: gives the verdicts.
        clean: labels, and what the model says about the clean images, by position.
        mode: "survivors" attacks what all earlier attacks left, "individual" every example that is
            classified correctly.
        batch_size: examples per call of an attack.
        journal: where finished batches are.
    """

    def __init__(
        self, attacks, model, scorer: Scorer, clean: Clean, mode: str, batch_size: int, journal
    ) -> None:
        self.attacks: list[Attack] = attacks
        self.model = model
        self.scorer = scorer
        self.labels = clean.labels
        self.num_classes = clean.num_classes
        self.clean_prediction = clean.scored.prediction.copy()
        self.mode = mode
        self.batch_size = batch_size
        self.journal: Journal = journal
        self.clean = ~clean.scored.wrong
        self.correct = {attack.name: self.clean.copy() for attack in attacks}
        self.unbroken = self.clean.copy()
        self.done = np.zeros(len(self.clean), bool)
        self.worst = Worst(
            np.where(self.clean, -1, -2),
            self.clean_prediction.copy(),
            clean.scored.margin.copy(),
            np.zeros(len(self.clean)),
            {},
        )
        self._tallies = [[_Tally(part) for part in parts(attack)] for attack in attacks]

    def attack_all(
        self,
        examples: Examples,
        shard,
        block_size: int,
        show_progress: bool,
        name: str = "attacks",
    ) -> np.ndarray:
        """Attacks the blocks of a shard, or all; returns the positions of their examples.

        Args:
            examples: all examples.
            shard: number of this shard and how many there are; None for the whole.
            block_size: how many examples are attacked together.
            show_progress: show how far this has come.
            name: what the console calls it.
        """
        positions = [np.zeros(0, int)]
        num_correct = int(self.clean[positions_of(len(self.clean), block_size, shard)].sum())
        facts = (self.attacks, self.mode, self.num_classes, num_correct)
        with Progress(name, *facts, show_progress) as progress:
            for block in examples.blocks(block_size, shard):
                self._check_order(block)
                self.attack(block, progress)
                positions.append(block.positions)
        return np.concatenate(positions)

    def _check_order(self, block: Block) -> None:
        if not np.array_equal(block.labels, self.labels[block.positions]):
            raise ValueError(
                "The data set has another order each time it is read; expected a tf.data.Dataset "
                "without shuffling; received other labels than in the first reading"
            )

    def attack(self, block: Block, progress: Progress) -> None:
        """Runs every attack on one block, and tells `progress` of every batch."""
        progress.block_begins(int(self.clean[block.positions].sum()))
        self._settle(block)
        for number, attack in enumerate(self.attacks):
            todo = (self.unbroken if self.mode == "survivors" else self.clean)[block.positions]
            alive = todo.copy()
            names = stage_names(number, attack)
            for stage, (part, name) in enumerate(zip(parts(attack), names, strict=True)):
                progress.stage_begins(number, stage, int(alive.sum()))
                self._run_stage(number, stage, part, name, block, alive, progress)
            self.correct[attack.name][block.positions] = alive
            self.unbroken[block.positions] &= alive
        self.done[block.positions] = True
        progress.block_done(self.unbroken[block.positions])

    def _settle(self, block: Block) -> None:
        """Takes the verdicts on clean images that were recorded when the block was begun."""
        rows, worst = block.positions, self.worst
        now = Scored(self.clean_prediction[rows], ~self.clean[rows], worst.margin[rows])
        settled = self.journal.settle(block.number, now)
        self.clean_prediction[rows] = worst.prediction[rows] = settled.prediction
        worst.margin[rows] = settled.margin
        worst.broken_by[rows] = np.where(settled.wrong, -2, -1)
        self.clean[rows] = self.unbroken[rows] = ~settled.wrong
        for flags in self.correct.values():
            flags[rows] = ~settled.wrong

    def _run_stage(self, number, stage, attack, name, block: Block, alive, progress) -> None:
        """Runs one attack on the rows of a block that are alive, and updates these in place."""
        rows = np.flatnonzero(alive)
        for batch, first in enumerate(range(0, len(rows), self.batch_size)):
            chosen = rows[first : first + self.batch_size]
            progress.batch_begins(len(chosen), attack.batch_size)
            path = self.journal.path(block.number, name, batch)
            outcome = self.journal.recall(path, block.positions[chosen])
            is_recorded = outcome is not None
            if outcome is None:
                outcome = self._attack_batch(attack, block, chosen)
                self.journal.record(path, outcome)
            alive[chosen] = ~outcome.broken
            self._tallies[number][stage].add(outcome)
            self._remember(number, outcome, path)
            left = self.unbroken[block.positions] & alive
            passes = float((outcome.forward_passes + outcome.backward_passes).sum())
            held = int((~outcome.broken).sum())
            progress.batch_done(held, passes, is_recorded, int(left.sum()), len(block.labels))

    def _attack_batch(self, attack: Attack, block: Block, rows: np.ndarray) -> BatchOutcome:
        images, labels, positions = (
            column[rows] for column in (block.images, block.labels, block.positions)
        )
        began = time.monotonic()
        result = attack(self.model, images, labels, example_ids=positions)
        seconds = time.monotonic() - began
        broken, margin = result.success.copy(), result.margin.astype(np.float32)
        prediction = labels.astype(np.int32)
        found = np.flatnonzero(broken)
        if len(found):
            # The verdict must be that of the very array that is recorded.
            scored = self.scorer(result.x_adv[found], labels[found])
            broken[found], margin[found] = scored.wrong, scored.margin
            prediction[found] = scored.prediction
        # If a minimum-norm attack breaks nothing, its distance is not that of the returned image.
        length = np.asarray(attack.threat.distance(result.x_adv, images))
        return BatchOutcome(
            positions=positions,
            labels=labels,
            broken=broken,
            prediction=prediction,
            margin=margin,
            distance=length,
            forward_passes=result.forward_passes,
            backward_passes=result.backward_passes,
            non_finite=result.non_finite,
            unconfirmed=result.success & ~broken,
            x_adv=result.x_adv[broken],
            seconds=np.array(seconds),
        )

    def _remember(self, number: int, outcome: BatchOutcome, path) -> None:
        worst, positions = self.worst, outcome.positions
        first = outcome.broken & (worst.broken_by[positions] == -1)
        chosen = positions[first]
        worst.broken_by[chosen] = number
        worst.prediction[chosen] = outcome.prediction[first]
        worst.margin[chosen] = outcome.margin[first]
        worst.distance[chosen] = outcome.distance[first]
        row_of = np.cumsum(outcome.broken) - 1
        worst.file_and_row.update(
            (int(position), (path, int(row)))
            for position, row in zip(chosen, row_of[first], strict=True)
        )
        closer = (worst.broken_by[positions] == -1) & (outcome.margin < worst.margin[positions])
        worst.margin[positions[closer]] = outcome.margin[closer]
        worst.distance[positions[closer]] = outcome.distance[closer]

    def rows(self, evaluated: np.ndarray, sample) -> list[AttackRow]:
        """Returns the report's lines over the examples with the given positions."""
        unbroken = self.clean[evaluated].copy()
        rows = []
        for attack, tallies in zip(self.attacks, self._tallies, strict=True):
            correct = self.correct[attack.name][evaluated]
            unbroken &= correct
            count = len(evaluated)
            left = int(correct.sum()), int(unbroken.sum())
            if isinstance(attack, Ensemble):
                rows.append(self._ensemble_row(attack, tallies, left, count, sample))
            else:
                warnings = agreed(self.model, sample[0])[1]
                rows.append(tallies[0].row(left, count, warnings))
        return rows

    def _ensemble_row(self, attack: Ensemble, tallies, left, count: int, sample) -> AttackRow:
        warnings = attack.warnings(self.model, *sample)
        total = _Tally(attack)
        total.num_attacked = tallies[0].num_attacked
        alive = left[0] + sum(tally.num_broken for tally in tallies)
        stages = []
        for number, tally in enumerate(tallies):
            alive -= tally.num_broken
            stages.append(tally.row((alive, alive), count))
            warnings += attack.stage_warnings(number, tally.num_broken, count)
            total.merge(tally)
        return total.row(left, count, warnings, stages, attack.note)


def panel_attacks(threat: ThreatModel, batch_size: int) -> list[Attack]:
    """Returns the attacks of the panel."""
    settings: dict = {"num_steps": _PANEL_STEPS, "batch_size": batch_size}
    return [
        ProjectedGradient(threat, logit_scale="unit", name="pgd-20, scale 1", **settings),
        ProjectedGradient(threat, name="pgd-20, model's scale", **settings),
        AdaptivePGD(threat, **{**settings, "name": "adaptive-pgd-20"}),
        ProjectedGradient(threat, loss="cw", name="margin-pgd-20", **settings),
        get("autoattack", threat, batch_size=batch_size),
    ]


def missing_attacks(
    attacks: list[Attack], mode: str, threat: ThreatModel, batch_size: int
) -> list[Attack]:
    """Returns the attacks that the panel adds to those of an evaluation.

    Args:
        attacks: the attacks of the evaluation.
        mode: its mode; "individual" attacks have run on every example, so the panel reuses them.
        threat: the threat model.
        batch_size: examples per compiled call.
    """
    done = [attack.get_config() for attack in attacks if mode == "individual"]
    return [each for each in panel_attacks(threat, batch_size) if each.get_config() not in done]


def run_panel(whole: AttackRuns, clean: Clean, images, labels, folder, show_progress: bool) -> dict:
    """Runs the attacks of the panel on the first examples; returns the report's "he_panel".

    Args:
        whole: the finished runs of the evaluation, whose results are reused.
        clean: what the model says about the clean images.
        images: the first images.
        labels: the first labels.
        folder: of the evaluation's record; None for none.
        show_progress: show a progress bar.
    """
    count, size, threat = len(labels), whole.batch_size, whole.attacks[0].threat
    attacks = panel_attacks(threat, size)
    rest = [attack for attack in attacks if not _has_run(whole, attack, count)]
    journal = Journal(folder / "he-panel" if folder else None, whole.journal.plan)
    few = clean.first(count)
    panel = AttackRuns(rest, whole.model, whole.scorer, few, "individual", size, journal)
    few_examples = Examples(threat, (images, labels), size)
    panel.attack_all(few_examples, None, count, show_progress, "panel")
    rows = []
    for attack, meaning in zip(attacks, MEANINGS, strict=True):
        runs = panel if attack in rest else whole
        num_correct = int(runs.correct[attack.name][:count].sum())
        rows.append(
            {
                "name": attack.name,
                "meaning": meaning,
                "robust_accuracy": num_correct / count,
                "interval": list(wilson_interval(num_correct, count)),
            }
        )
    # Each row is compared with the lowest of all, so there are several chances (Bonferroni).
    needed = fewest_gains(count, 0.0, CHANCE_LEVEL / max(len(rows) - 1, 1))
    return {"num_examples": count, "resolution": resolution(needed, count, "a gap"), "rows": rows}


def _has_run(whole: AttackRuns, attack: Attack, num_examples: int) -> bool:
    """Whether an evaluation has run this very attack on each of the first examples."""
    configs = [each.get_config() for each in whole.attacks]
    is_individual = whole.mode == "individual" and attack.get_config() in configs
    return is_individual and bool(whole.done[:num_examples].all())
