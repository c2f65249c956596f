"""Scores the recorded adversarial images of an evaluation again, with a model that was just loaded.

The record is read block by block, in the order in which it was made. So the memory needed does not
grow with its length. The verdicts are counted again and compared with the report's, example by
example. Equal verdicts do not make equal functions, so the model's answers are compared too.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

from he_keras.evaluation.report.robustness_report import read_per_example
from he_keras.evaluation.run.examples import Block, DataDigest, Examples, Scorer
from he_keras.evaluation.run.facts import differences, for_report, section_differences, shown
from he_keras.evaluation.run.identity import function_differences, has_answers
from he_keras.evaluation.run.journal import (
    FOLDER,
    BatchOutcome,
    batch_path,
    clean_path,
    read_batch,
    read_clean,
)
from he_keras.files import read_json
from he_keras.threat import ThreatModel

# Images are stored in single precision.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Verification:
    """What scoring again showed.

    Attributes:
        num_images: recorded adversarial images.
        num_held: of them, those that the model classifies correctly now.
        num_outside: of them, those outside the ball around their image, or the bounds.
        max_distance: of all, in the threat model's norm.
        num_missing: records that should exist and do not; later records of their block are not
            looked for.
        num_changed: clean images whose verdict is now another one.
        is_same_data: whether images and labels are those of the evaluation.
        worst_case: share of all examples that no record shows broken; None if any is missing.
        model_differences: how the model differs from the one that was attacked, as text.
        deviations: what the report's files say and the records do not, as text.
    """

    num_images: int
    num_held: int
    num_outside: int
    max_distance: float
    num_missing: int
    num_changed: int
    is_same_data: bool
    worst_case: float | None
    model_differences: tuple[str, ...]
    deviations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every recorded verdict exists, is still the verdict, and is in the report."""
        wrong = (self.num_held, self.num_outside, self.num_missing, self.num_changed)
        others = (*self.model_differences, *self.deviations)
        return not any(wrong) and self.is_same_data and not others

    def summary(self) -> str:
        """Returns the result as a sentence, and one more sentence for each other fault."""
        verdict = "hold" if self.holds else "DO NOT HOLD"
        lines = [
            f"The recorded verdicts {verdict}: of {self.num_images} adversarial images "
            f"{self.num_held} are classified correctly now, {self.num_outside} lie outside the "
            f"threat model (largest distance {self.max_distance:.6g})."
        ]
        if self.worst_case is not None:
            lines.append(f"Worst case by the records: {self.worst_case:.2%}.")
        if self.num_missing:
            lines.append(
                f"Records are missing: {self.num_missing} or more. The evaluation has not ended: "
                "run it again, or merge its shards."
            )
        if self.num_changed:
            lines.append(f"Clean images with another verdict now: {self.num_changed}.")
        if not self.is_same_data:
            lines.append("Images or labels are others than those of the evaluation.")
        if self.model_differences:
            lines.append(f"The model is another one: {shown(list(self.model_differences))}.")
        lines += [f"The report deviates: {each}." for each in self.deviations]
        return "\n".join(lines)


def verify(model, examples, folder, batch_size: int = 250) -> Verification:
    """Scores every image that an evaluation has recorded in `folder`, and counts the worst case.

    Args:
        model: the model of the evaluation.
        examples: the data of the evaluation.
        folder: its `output_dir`.
        batch_size: examples per batch of the data that are read.

    Example:
        >>> import tempfile, he_keras as he, numpy as np, tensorflow as tf
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> data = np.array([[0.55, 0.5]], "float32"), np.array([0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = he.evaluate_robustness(
        ...         logits, data, he.ThreatModel("linf", 0.1), ["fgsm"], folder, checks=False)
        ...     he.evaluation.verify(logits, data, folder).num_images
        1
    """
    folder = pathlib.Path(folder)
    settings = _recorded_settings(folder)
    threat = ThreatModel.from_config(settings["threat"])
    others = function_differences(model, settings["model"], folder)
    count = _Count(Scorer(model), threat, settings, folder / FOLDER)
    count.missing += not has_answers(folder)
    digest = DataDigest()
    for block in Examples(threat, examples, batch_size).blocks(settings["block_size"], None):
        digest.update(block.images, block.labels)
        count.add(block)
    return Verification(
        num_images=count.images,
        num_held=count.held,
        num_outside=count.outside,
        max_distance=count.max_distance,
        num_missing=count.missing,
        num_changed=count.changed,
        is_same_data=digest.text() == settings["data"],
        worst_case=None if count.missing else _share(count.broken_by == -1),
        model_differences=tuple(others),
        deviations=() if count.missing else _deviations(count, settings, folder),
    )


class _Count:
    """Replays the record, block by block."""

    def __init__(self, scorer: Scorer, threat: ThreatModel, settings: dict, folder) -> None:
        self._scorer, self._threat, self._settings = scorer, threat, settings
        self._folder = folder
        self._plan = for_report(settings)
        self.images = self.held = self.outside = self.missing = self.changed = 0
        self.max_distance = 0.0
        self.names = [attack["name"] for attack in settings["attacks"]]
        self._flags: dict[str, list[np.ndarray]] = {}

    def add(self, block: Block) -> None:
        """Scores a block's clean images and its records."""
        path = clean_path(self._folder, block.number)
        if not path.exists():
            self.missing += 1
            return
        clean = ~read_clean(path, self._plan).wrong
        self.changed += int((clean == self._wrong(block)).sum())
        found, unbroken = {"labels": block.labels, "clean": clean}, clean.copy()
        broken_by = np.where(clean, -1, -2)
        for number, name in enumerate(self.names):
            stages = self._settings["stages"][number]
            alive = (unbroken if self._settings["mode"] == "survivors" else clean).copy()
            for stage in stages:
                if not self._replay(stage, block, alive):
                    self.missing += 1
                    return
            broken_by[unbroken & ~alive] = number
            unbroken &= alive
            found[name] = alive
        for name, column in {**found, "broken_by": broken_by}.items():
            self._flags.setdefault(name, []).append(column)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The verdicts on all examples, by the names of `per_example.npz`."""
        return {name: np.concatenate(parts) for name, parts in self._flags.items()}

    @property
    def broken_by(self) -> np.ndarray:
        """The number of the first attack that broke each example; -1 for none, -2 for wrong."""
        return self.columns["broken_by"]

    def _wrong(self, block: Block) -> np.ndarray:
        size = self._settings["batch_size"]
        rows = [slice(first, first + size) for first in range(0, len(block.labels), size)]
        parts = [self._scorer(block.images[each], block.labels[each]).wrong for each in rows]
        return np.concatenate(parts)

    def _replay(self, stage: str, block: Block, alive: np.ndarray) -> bool:
        """Scores an attack's batches and updates who is alive; False where one is missing."""
        rows, size = np.flatnonzero(alive), self._settings["batch_size"]
        for batch, first in enumerate(range(0, len(rows), size)):
            chosen = rows[first : first + size]
            path = batch_path(self._folder, block.number, stage, batch)
            if not path.exists():
                return False
            outcome = read_batch(path, self._plan, block.positions[chosen])
            self._score(outcome, block.images[chosen[outcome.broken]])
            alive[chosen] = ~outcome.broken
        return True

    def _score(self, outcome: BatchOutcome, images: np.ndarray) -> None:
        if not len(images):
            return
        x_adv, threat = outcome.x_adv, self._threat
        low, high = threat.bounds
        scored = self._scorer(x_adv, outcome.labels[outcome.broken])
        distance = np.asarray(threat.distance(x_adv, images.astype(x_adv.dtype)))
        flat = x_adv.reshape(len(x_adv), -1)
        inside = (flat.min(axis=1) >= low - _ROUNDING) & (flat.max(axis=1) <= high + _ROUNDING)
        inside &= distance <= threat.epsilon * (1 + 1e-5) + _ROUNDING
        self.images += len(images)
        self.held += int((~scored.wrong).sum())
        self.outside += int((~inside).sum())
        self.max_distance = max(self.max_distance, float(distance.max()))


def _deviations(count: _Count, settings: dict, folder: pathlib.Path) -> tuple[str, ...]:
    """Compares the records with the report; shards have no report before they are merged."""
    if not (folder / "report.json").exists():
        return ()
    report, columns = read_json(folder / "report.json"), count.columns
    rows = {row["name"]: row["robust_accuracy"] for row in report["attacks"]}
    pairs = {
        "number of examples": (report["num_examples"], len(columns["clean"])),
        "clean accuracy": (report["clean_accuracy"], _share(columns["clean"])),
        "worst case": (report["worst_case"], _share(columns["broken_by"] == -1)),
        **{name: (rows.get(name), _share(columns[name])) for name in count.names},
    }
    figures = [
        f"{name} {written} there, {found} by the records"
        for name, (written, found) in pairs.items()
        if written is None or abs(written - found) > 1e-9
    ]
    plan = for_report(settings)
    found = section_differences(report, {"threat": plan["threat"]})
    found += differences(report["settings"], plan) if report.get("settings") else []
    return (*figures, *dict.fromkeys(found), *_other_verdicts(columns, folder))


def _other_verdicts(columns: dict[str, np.ndarray], folder: pathlib.Path) -> Iterator[str]:
    """Yields in which columns `per_example.npz` says something else than the records."""
    stored = read_per_example(folder)
    for name, found in columns.items():
        written = stored.get(name)
        if written is None or written.shape != found.shape:
            yield f"per_example.npz has no {name} of {len(found)} examples"
        elif (written != found).any():
            yield f"{name} of {int((written != found).sum())} examples in per_example.npz"


def _share(flags: np.ndarray) -> float:
    return int(flags.sum()) / len(flags)


def _recorded_settings(folder: pathlib.Path) -> dict:
    path = folder / FOLDER / "settings.json"
    try:
        settings = read_json(path)
        ThreatModel.from_config(settings["threat"])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"Not the folder of an evaluation; expected {path}; received {error}"
        ) from error
    if not any(each.is_dir() for each in (folder / FOLDER).iterdir()):
        raise ValueError(
            "No evaluation in this folder; expected what he-keras evaluate has recorded; received "
            f"{folder} without any record: evaluate into it first"
        )
    if "stages" not in settings:
        raise ValueError(
            "The folder was written by an earlier he_keras, which recorded less; expected one of "
            f"this version; received {folder}; evaluate again, into another folder"
        )
    return settings
