"""Conversions of a served model to other formats, and how much accuracy each one loses.

A conversion is another classifier, because rounding moves its boundaries. So each is scored
together with the original, on clean test images and on adversarial ones. The adversarial images are
crafted for the original, which has gradients. For a conversion they are a transfer attack, so its
accuracy on them is an upper bound of its robustness: attacks on the conversion itself may find
more.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from he_keras import attacks
from he_keras.arguments import check_number, check_positive_integer, reason_of, suggestion
from he_keras.attacks import Attack, Victim
from he_keras.data import eval_pipeline
from he_keras.environment import environment
from he_keras.evaluation.run.examples import Examples
from he_keras.export.float32_copy import in_float32
from he_keras.export.litert import PRECISIONS, LiteRTClassifier, convert_to_litert
from he_keras.export.onnx_file import OnnxClassifier, check_onnx_is_installed, convert_to_onnx
from he_keras.export.served_classifier import ServedClassifier
from he_keras.files import write_json
from he_keras.threat import ThreatModel, bounds_of, check_threat

SCHEMA_VERSION = 1
_LITERT = {f"litert-{precision}": precision for precision in PRECISIONS}
_GROUPS = {"litert": tuple(_LITERT), "onnx": ("onnx",)}
#: The names that a plan may contain; "litert" stands for its three precisions.
FORMATS = (*_GROUPS, *_LITERT)
_FILES = {
    **{name: f"conversions/{precision}.tflite" for name, precision in _LITERT.items()},
    "onnx": "conversions/model.onnx",
}
_ORIGINAL = "keras"
# Tolerance for the rounding of differences between accuracies.
_ROUNDING = 1e-9
_LIBRARIES = ("onnx", "tf2onnx", "onnxruntime", "ai-edge-litert")


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Which conversions to make, and on what to score them.

    Args:
        formats: some of `FORMATS`.
        test: the test images, a data set of `he_keras.data`.
        train: the training images. "litert-int8" takes the ranges of its integers from some of
            them.
        threat: the threat model of the adversarial images.
        attack: an `Attack` with `stop_when_broken=False`, the name of one, or "default": PGD-20 on
            the margin, which the scale of the logits cannot fool.
        max_loss: how much clean or adversarial accuracy a conversion may lose before it is flagged.
        num_representative: how many training images "litert-int8" sees.
        batch_size: images per pass.
    """

    formats: Sequence[str]
    test: Any
    train: Any
    threat: ThreatModel
    attack: Any = "default"
    max_loss: float = 0.01
    num_representative: int = 200
    batch_size: int = 250

    def __post_init__(self) -> None:
        names = parse_formats(self.formats)
        if "onnx" in names:
            check_onnx_is_installed()
        check_threat(self.threat)
        check_number("max_loss", self.max_loss, 0.0)
        check_positive_integer("num_representative", self.num_representative)
        check_positive_integer("batch_size", self.batch_size)
        object.__setattr__(self, "formats", names)
        object.__setattr__(self, "attack", _resolve_attack(self))


@dataclasses.dataclass(frozen=True)
class ConversionScore:
    """One row of the table: the original or a conversion.

    Attributes:
        name: "keras" for the original.
        file: its path in `assets.extra`; None for the original.
        num_bytes: the size of the file.
        sha256: the digest of the file.
        clean_accuracy: the accuracy on the test images.
        transferred_accuracy: the accuracy on the images that the attack crafted for the original.
        clean_change: the clean accuracy minus that of the original.
        transferred_change: the transferred accuracy minus that of the original.
        agreement: the share of clean images that get the same class as from the original.
        largest_logit_difference: the largest difference from the original's logits on clean images.
        is_flagged: whether the conversion lost more than allowed.
    """

    name: str
    file: str | None
    num_bytes: int | None
    sha256: str | None
    clean_accuracy: float
    transferred_accuracy: float
    clean_change: float
    transferred_change: float
    agreement: float
    largest_logit_difference: float
    is_flagged: bool


def parse_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of single conversions, each once.

    Example:
        >>> from he_keras.export.conversions import parse_formats
        >>> parse_formats(["onnx", "litert"])
        ('onnx', 'litert-float32', 'litert-float16', 'litert-int8')
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        near = suggestion(unknown[0], FORMATS) if unknown else ""
        raise ValueError(
            f"Unknown format; expected some of {FORMATS}; received {unknown or list(formats)}{near}"
        )
    names = [each for name in formats for each in _GROUPS.get(name, (name,))]
    return tuple(dict.fromkeys(names))


def convert_and_score(served: ServedClassifier, plan: ConversionPlan, folder: pathlib.Path) -> dict:
    """Writes all conversions and `conversions.json`, and returns the content of this file.

    Args:
        served: the original.
        plan: the conversions to make.
        folder: the folder `assets.extra`. The files go to its sub-folder `conversions`.
    """
    bounds_of(served, plan.threat.bounds)
    contents = _contents(served, plan)
    (folder / "conversions").mkdir()
    for name, content in contents.items():
        (folder / _FILES[name]).write_bytes(content)
    result = _score(served, plan, contents)
    write_json(folder / "conversions.json", result)
    return result


def _contents(served: ServedClassifier, plan: ConversionPlan) -> dict[str, bytes]:
    """The bytes of each file, by the name of the conversion."""
    wide = ServedClassifier(
        in_float32(served.model), served.class_names, served.temperature, bounds=served.bounds
    )
    precisions = [_LITERT[name] for name in plan.formats if name in _LITERT]
    contents: dict[str, bytes] = {}
    if precisions:
        images = _representative(plan) if "int8" in precisions else np.zeros(0)
        with _one_error("LiteRT"):
            made = convert_to_litert(wide, precisions, images)
        contents = {f"litert-{precision}": content for precision, content in made.items()}
    if "onnx" in plan.formats:
        with _one_error("ONNX"):
            contents["onnx"] = convert_to_onnx(wide)
    return contents


@contextlib.contextmanager
def _one_error(form: str) -> Iterator[None]:
    """Turns any error of a converter, which may have hundreds of lines, into one short error."""
    try:
        yield
    except (OSError, tf.errors.OpError):
        # A full disk is not the model's fault.
        raise
    except Exception as error:
        raise ValueError(
            f"Cannot convert the model; expected operations that {form} has; "
            f"received {reason_of(error)}"
        ) from error


def _representative(plan: ConversionPlan) -> np.ndarray:
    """Training images, evenly spaced, because some data sets are sorted by class."""
    count = min(plan.num_representative, len(plan.train))
    chosen = plan.train.subset(np.linspace(0, len(plan.train) - 1, count).round().astype(int))
    batches = [images.numpy() for images, _ in eval_pipeline(chosen, plan.batch_size)]
    return plan.threat.from_unit(np.concatenate(batches))


def _score(served: ServedClassifier, plan: ConversionPlan, contents: dict[str, bytes]) -> dict:
    classifiers = {name: _classifier(name, content) for name, content in contents.items()}
    victim = Victim(served.model)
    answers = _answers({_ORIGINAL: victim.logits, **classifiers}, served.model, plan)
    original = answers[_ORIGINAL]
    rows = [
        _row(name, answer, original, contents.get(name), plan.max_loss)
        for name, answer in answers.items()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "data": plan.test.name,
        "split": plan.test.split,
        "num_examples": len(original.predicted),
        "threat": plan.threat.get_config(),
        "attack": plan.attack.get_config(),
        "max_loss": plan.max_loss,
        "rows": [dataclasses.asdict(row) for row in rows],
        "environment": {**environment(), **_library_versions()},
    }


def _row(name: str, answer: "_Answers", original: "_Answers", content, max_loss: float):
    changes = answer.clean - original.clean, answer.attacked - original.attacked
    return ConversionScore(
        name,
        _FILES.get(name),
        None if content is None else len(content),
        None if content is None else hashlib.sha256(content).hexdigest(),
        answer.clean,
        answer.attacked,
        *changes,
        float((answer.predicted == original.predicted).mean()),
        float(np.abs(answer.logits - original.logits).max()),
        min(changes) < -max_loss - _ROUNDING,
    )


@dataclasses.dataclass(frozen=True)
class _Answers:
    """A classifier's logits of the clean images, and its two accuracies."""

    logits: np.ndarray
    clean: float
    attacked: float

    @property
    def predicted(self) -> np.ndarray:
        return self.logits.argmax(axis=1)


def _answers(classifiers: dict[str, Callable], model, plan: ConversionPlan) -> dict[str, _Answers]:
    """Scores every classifier on the test images and on the images crafted for the model."""
    logits: dict[str, list] = {name: [] for name in classifiers}
    num_right: dict[str, list] = {name: [] for name in classifiers}
    examples = Examples(plan.threat, plan.test, plan.batch_size)
    plan.attack.check_model(model, *examples.first(1))
    for block in examples.blocks(plan.batch_size, None):
        adversarial = plan.attack(model, block.images, block.labels, example_ids=block.positions)
        for name, classifier in classifiers.items():
            clean = np.asarray(classifier(block.images))
            attacked = np.asarray(classifier(adversarial.x_adv))
            logits[name].append(clean)
            num_right[name].append(
                [(each.argmax(axis=1) == block.labels).sum() for each in (clean, attacked)]
            )
    found = {}
    for name, parts in logits.items():
        joined = np.concatenate(parts)
        clean_right, attacked_right = np.sum(num_right[name], axis=0) / len(joined)
        found[name] = _Answers(joined, float(clean_right), float(attacked_right))
    return found


def _classifier(name: str, content: bytes) -> Callable:
    return OnnxClassifier(content) if name == "onnx" else LiteRTClassifier(content)


def _resolve_attack(plan: ConversionPlan) -> Attack:
    if isinstance(plan.attack, Attack):
        attack = plan.attack
    else:
        options: dict = {"batch_size": plan.batch_size, "stop_when_broken": False}
        if plan.attack == "default":
            options.update(loss="cw", name="margin-pgd-20")
        name = "pgd-20" if plan.attack == "default" else plan.attack
        attack = attacks.get(name, plan.threat, **options)
    if getattr(attack, "stop_when_broken", True) or attack.minimum_norm:
        raise ValueError(
            "Images transfer only if they are attacked to the end; expected an attack inside the "
            f"ball with stop_when_broken=False, such as pgd-20; received {attack.name}"
        )
    return attack


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
