"""Measures the numbers that cells need on one run, and records each as soon as it is known."""

import csv
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterable

import keras
import numpy as np

from he_keras import attacks
from he_keras.attacks import Attack
from he_keras.data import ImageDataset
from he_keras.evaluation import evaluate_corruptions, evaluate_robustness, protocols
from he_keras.evaluation.run.examples import Examples, Scorer, classify
from he_keras.experiment import build_threat
from he_keras.experiment.run_folder import held
from he_keras.reproduction import scales
from he_keras.reproduction.cells import Measurement
from he_keras.reproduction.models import Run
from he_keras.threat import ThreatModel

_BATCH_SIZE, _SMOKE_BATCH_SIZE = 250, 8
#: A corruption needs no more images for an accuracy at the small scale.
_CPU_CORRUPTED = 1000
#: What `evaluate_robustness` adds where all attacks depend on the scale of the logits.
_SCALE_FREE = "cw-linf-20"
_MINUTE = 60.0


class Measuring:
    """Measures what is missing on a run.

    Args:
        run: the run, which is trained.
        scale: one of `scales.SCALES`.
        corruptions: where corrupted images come from, see `evaluate_corruptions`.
        crafting: returns the run of an experiment whose model images are crafted for.
        show_progress: show progress bars.
    """

    def __init__(
        self,
        run: Run,
        scale: str,
        corruptions: str = "generated",
        crafting: Callable[[str], Run] | None = None,
        show_progress: bool = False,
    ) -> None:
        self.run = run
        self.scale = scale
        self.corruptions = corruptions
        self.crafting = crafting
        self.show_progress = show_progress
        self.batch_size = _SMOKE_BATCH_SIZE if scale == "smoke" else _BATCH_SIZE
        self._loaded: tuple | None = None

    def measure(self, wanted: Iterable[Measurement]) -> None:
        """Measures what is not recorded yet; interrupted, the same call goes on."""
        known = self.run.results()
        missing = [each for each in dict.fromkeys(wanted) if each.key() not in known]
        if not missing:
            return
        with held(self.run.folder, "measures"):
            for kind, function in (
                ("setting", self._setting),
                ("minutes", self._minutes),
                ("minutes of an epoch", self._minutes),
                ("clean", self._clean),
            ):
                for each in missing:
                    if each.kind == kind and can_measure(each, self.run):
                        self.run.record({each.key(): function(each)})
            self._attacks([each for each in missing if each.kind == "attack"])
            self._corruptions([each for each in missing if each.kind == "corruption"])

    @property
    def _model(self):
        return self._model_and_images()[0]

    @property
    def _images(self):
        return self._model_and_images()[1]

    def _model_and_images(self) -> tuple:
        if self._loaded is None:
            model, images = self.run.load(), self.run.test_images()
            if isinstance(images, ImageDataset) and self.scale == "smoke":
                images = with_own_answers(model, images)
            self._loaded = model, images
        return self._loaded

    def _setting(self, wanted: Measurement) -> dict:
        value = self.run.config
        for part in wanted.name.split("."):
            value = value[part]
        return {"value": value, "from": "config.json"}

    def _minutes(self, wanted: Measurement) -> dict:
        """Minutes of training and validation, which the run's history has kept."""
        with open(self.run.folder / "history.csv", newline="") as file:
            seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
        per_epoch = wanted.kind == "minutes of an epoch"
        total = np.mean(seconds) if per_epoch else np.sum(seconds)
        return {"value": float(total) / _MINUTE, "from": "history.csv"}

    def _clean(self, wanted: Measurement) -> dict:
        examples = Examples(build_threat(self.run.config), self._images, self.batch_size)
        wrong = classify(Scorer(self._model), examples).scored.wrong
        return {"value": float(1.0 - wrong.mean()), "examples": len(wrong)}

    def _attacks(self, wanted: list[Measurement]) -> None:
        """Runs attacks that share protocol, radius and images in one evaluation."""
        groups: dict[tuple, list[tuple[Measurement, Attack, Attack]]] = {}
        for each in wanted:
            attack, text = self.attack_of(each)
            smaller = scales.sized(attack, self.scale)
            classes = self.run.config.head.num_classes
            count = scales.images_for(attack, self.scale, classes, each.examples)
            groups.setdefault((attack.threat, count, text), []).append((each, attack, smaller))
        for (threat, count, text), members in groups.items():
            self._evaluate(threat, count, text, members)

    def attack_of(self, wanted: Measurement) -> tuple[Attack, str | None]:
        """Returns the attack with the paper's settings, and its protocol's text or None."""
        if wanted.protocol:
            protocol = protocols.get(wanted.protocol, self.batch_size)
            found = {attack.name: attack for attack in protocol.attacks}
            return found[wanted.name], protocol.text
        threat = ThreatModel(self.run.config.threat.norm, wanted.epsilon)
        name = wanted.name
        if wanted.crafted_for and self.crafting is not None:
            name = f"{name}:{self.crafting(wanted.crafted_for).model_file()}"
        # An evaluation tells attacks apart by their names.
        own_name = wanted.key().removeprefix("attack/").replace("/", ", ")
        options = {"batch_size": self.batch_size, **dict(wanted.options), "name": own_name}
        return attacks.get(name, threat, **options), None

    def _evaluate(self, threat: ThreatModel, count: int, text: str | None, members) -> None:
        images = self._images
        images = images.take(min(count, len(images))) if count else images
        names = [each.key() for each, _, _ in members]
        digits = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        folder = self.run.folder / "evaluations" / f"{members[0][0].protocol or 'own'}-{digits}"
        chosen = [smaller for _, _, smaller in members]
        report = evaluate_robustness(
            self._model,
            images,
            threat,
            chosen,
            folder,
            self.batch_size,
            mode="individual",
            checks=False,
            panel=False,
            protocol=text,
            show_progress=self.show_progress,
        )
        accuracies = {row.name: row.robust_accuracy for row in report.rows}
        added = accuracies.get(_SCALE_FREE) if len(accuracies) > len(chosen) else None
        found = {}
        for wanted, original, smaller in members:
            is_soft = original.logit_scale != "model" and _depends_on_scale(original)
            found[wanted.key()] = {
                "value": accuracies[smaller.name],
                "examples": report.num_examples,
                "scale_free": added if is_soft else None,
                "changed": changed_settings(original, smaller),
                "report": str(pathlib.Path(folder).relative_to(self.run.folder)),
            }
        self.run.record(found)

    def _corruptions(self, wanted: list[Measurement]) -> None:
        for name in dict.fromkeys(each.name for each in wanted):
            severities = tuple(sorted({each.severity for each in wanted if each.name == name}))
            report = evaluate_corruptions(
                self._model,
                self._images,
                [name],
                severities,
                self.corruptions,
                self.batch_size,
                _CPU_CORRUPTED if self.scale == "cpu" else None,
                show_progress=self.show_progress,
            )
            shares = dict(zip(severities, report.accuracy[name], strict=True))
            self.run.record(
                {
                    Measurement("corruption", name, severity=severity).key(): {
                        "value": share,
                        "examples": report.num_images,
                        "source": report.source,
                    }
                    for severity, share in shares.items()
                }
            )


def with_own_answers(model, dataset: ImageDataset) -> ImageDataset:
    """Returns the images with labels by which the model is right about every second one.

    Attacks leave wrong images alone, and the feature attack needs targets of two labels.
    """
    images, _ = dataset.as_float()
    answers = keras.ops.convert_to_numpy(model(images, training=False)).argmax(axis=-1)
    labels = (answers + np.arange(len(answers)) % 2) % dataset.num_classes
    return dataclasses.replace(dataset, labels=labels)


def _depends_on_scale(attack: Attack) -> bool:
    return getattr(attack, "loss", None) in ("ce", "kl")


def can_measure(wanted: Measurement, run: Run) -> bool:
    """Whether there is such a number: of a public checkpoint neither settings nor times are."""
    return not (run.is_public and wanted.is_of_training)


def changed_settings(original: Attack, smaller: Attack) -> list[str]:
    """Returns what a scale has changed of an attack."""
    before, after = original.get_config(), smaller.get_config()
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
