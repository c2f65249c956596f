"""Turns an ordinary Keras classifier into one that can be attacked: logits, of images in [0, 1].

Most classifiers end in a softmax or a sigmoid, and many take pixels in 0..255. Attacks need logits,
since the gradient of a confident probability is zero. A radius such as 8/255 is in units of [0, 1].
"""

import dataclasses

import keras
import numpy as np

from he_keras.adversarial_model import HEAdversarialModel
from he_keras.arguments import check_choice, reason_of
from he_keras.data.datasets import class_numbers
from he_keras.evaluation.statistics import CHANCE_LEVEL, fewest_beyond, mcnemar_p_value
from he_keras.layers.call_context import call_context
from he_keras.networks import surgery
from he_keras.networks.checks import PROBABILITIES, check_single
from he_keras.snapshot_ensemble import SnapshotEnsemble
from he_keras.threat import UNIT_BOUNDS, trained_threat

OUTPUTS = ("auto", "logits", "probabilities")
PIXELS = ("auto", "0..1", "0..255")
_UNDONE = ("softmax", "sigmoid")
#: How far the rows of a softmax may miss the sum 1, and values the interval [0, 1].
_SUM_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2
#: A share may differ so much between the model and its copy, and a logit by so much of the spread.
_SAME, _HALF_SAME = 1e-3, 3e-2
#: Two ranges of pixels are told apart where chance explains the difference this rarely.
_RARE = 1e-3
#: So many times better than the other range, above chance, is a range that is far more accurate.
_FAR_MORE = 1.5
#: Confidence as a share of skill, both above chance. The first is usual in the own range, the
#: second is left of it if the pixels are 255 times too small.
_CONFIDENT, _IGNORANT = 0.5, 0.12
#: The smallest probability whose logarithm is taken.
_TINY = 1e-30
_NUM_PROBES, _ANY_SIDE, _BATCH = 32, 32, 100


@keras.saving.register_keras_serializable(package="he_keras")
class WrappedClassifier(keras.Model):
    """A functional model from images in [0, 1] to logits, which says what was done to get there.

    `wrap_classifier` makes it. It holds copies of the classifier's layers, and no code of its own.

    Attributes:
        conversion: what was done, in a few words.
        bounds: the pixel bounds of its images, (0, 1).
    """

    bounds = UNIT_BOUNDS

    def __init__(self, *args, conversion: str = "", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.conversion = conversion

    def get_config(self) -> dict:
        """Returns the layers and the conversion as plain data."""
        return {**super().get_config(), "conversion": self.conversion}

    @classmethod
    def from_config(cls, config, custom_objects=None) -> "WrappedClassifier":
        """Builds a model from `get_config()`'s result."""
        options = dict(config)
        conversion = options.pop("conversion")
        model = super().from_config(options, custom_objects)
        model.conversion = conversion
        return model


def wrap_classifier(
    model: keras.Model,
    outputs: str = "auto",
    pixels: str = "auto",
    images=None,
    labels=None,
    verbose: bool = True,
) -> keras.Model:
    """Returns a classifier as attacks need it: from images in [0, 1] to one logit for each class.

    A softmax or sigmoid at the end is removed where it is a layer or an activation of the last
    Dense layer. Otherwise it is undone by a logarithm. One sigmoid unit becomes two classes. A
    model of pixels in 0..255 gets a layer in front that multiplies by 255. The result holds copies
    of the layers: train first, then wrap. Where nothing has to be done, it is the model itself.
    Where the evidence is ambiguous, an error says which argument decides.

    A plain function cannot be wrapped. Nothing tells its sigmoid from a logit: pass a function that
    returns a logit for each class.

    Args:
        model: a trained `keras.Model` from images to probabilities or logits. Of an ensemble, each
            member is wrapped.
        outputs: what the model returns: "logits", "probabilities" or "auto".
        pixels: what the model takes: "0..1", "0..255" or "auto".
        images: clean images, in [0, 1] or in 0..255, by which "auto" decides. Some hundred are
            enough. The first layers may show the range without them.
        labels: class numbers or one-hot rows of these images.
        verbose: print what was done, in one line.

    Example:
        >>> import he_keras as he, keras
        >>> layers = [keras.Input((64,)), keras.layers.Rescaling(1 / 255)]
        >>> model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")], name="mine")
        >>> wrapped = he.wrap_classifier(model)
        mine: softmax removed; images in 0..1 times 255 (its first layers show that it takes 0..255)
    """
    check_choice("outputs", outputs, OUTPUTS)
    check_choice("pixels", pixels, PIXELS)
    if isinstance(model, SnapshotEnsemble):
        options = (outputs, pixels, images, labels, verbose)
        return model.with_members(lambda member: wrap_classifier(member, *options))
    _check_classifier(model)
    if knows_its_images(model):
        _check_nothing_asked(model, outputs, pixels)
        return model
    found = inspect(model, outputs, pixels, images, labels)
    wrapped = wrapped_as_found(model, found)
    if verbose:
        print(f"{model.name}: {remark(wrapped, found)}")
    return wrapped


def remark(wrapped, found: "Inspection") -> str:
    """What was done to a classifier, and how its pixels are known."""
    done = getattr(wrapped, "conversion", "") or "taken as it is: logits of images in 0..1"
    return f"{done} ({found.evidence})"


def knows_its_images(model) -> bool:
    """Whether a model is made by he_keras, returns logits and names the range of its images."""
    named = trained_threat(model) is not None or getattr(model, "bounds", None) is not None
    return named or isinstance(model, HEAdversarialModel)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found out about a classifier.

    Attributes:
        kind: "logits", "softmax" or "sigmoid": what it returns.
        pixels: "0..1" or "0..255", or None where nothing tells.
        evidence: how the pixels are known, in a few words.
        columns: how many numbers it returns for an image.
        probes: images in [0, 1] that it is tried with.
        parts: its parts, or None where it is opaque.
    """

    kind: str
    pixels: str | None
    evidence: str
    columns: int
    probes: np.ndarray
    parts: surgery.Parts | None

    @property
    def factor(self) -> float:
        """What images in [0, 1] are multiplied by."""
        return 255.0 if self.pixels == "0..255" else 1.0

    @property
    def has_cut(self) -> bool:
        """Whether the last activation is a part that can be left out."""
        return self.parts is not None and self.parts.activation == self.kind


def inspect(model, outputs="auto", pixels="auto", images=None, labels=None) -> Inspection:
    """Finds out what a classifier returns and which pixels it takes; see `wrap_classifier`."""
    parts = surgery.take_apart(model)
    probes = _probes(model) if images is None else unit_images(images)
    # On the grid of integers, which a model with an integer input rounds to.
    probes = np.round(probes * 255.0) / np.float32(255.0)
    _check_fit(model, probes)
    answers = {factor: _answers(model, _as_taken(probes, factor)) for factor in (1.0, 255.0)}
    kind = _kind(parts.activation if parts else "", list(answers.values()), outputs)
    known = (pixels, f"pixels={pixels} was given")
    if pixels == "auto":
        known = _pixels(parts, kind, answers, None if images is None else labels)
    return Inspection(kind, *known, answers[1.0].shape[1], probes[:_NUM_PROBES], parts)


def _as_taken(probes: np.ndarray, factor: float) -> np.ndarray:
    return probes if factor == 1.0 else np.round(probes * factor)


def _check_fit(model, images: np.ndarray) -> None:
    shape = getattr(model, "input_shape", None) if getattr(model, "outputs", None) else None
    sides = (None, *images.shape[1:]) if shape is None else shape
    fits = len(sides) == images.ndim and all(
        side in (None, size) for side, size in zip(sides[1:], images.shape[1:], strict=True)
    )
    if not fits:
        raise ValueError(
            f"Images do not fit the model; expected shape {tuple(sides)}; "
            f"received shape {images.shape}"
        )


def unit_images(images) -> np.ndarray:
    """Returns images in 0..255 or in [0, 1] as floats in [0, 1]."""
    images = np.asarray(images)
    if np.issubdtype(images.dtype, np.integer):
        return images.astype(np.float32) / np.float32(255.0)
    low, high = float(images.min()), float(images.max())
    if not (low >= 0.0 and high <= 255.0):
        raise ValueError(
            "Invalid images; expected pixels in [0, 1] or in 0..255, as they are before any "
            f"normalisation; received values in [{low}, {high}]"
        )
    return images.astype(np.float32) / np.float32(255.0 if high > 1.0 else 1.0)


def _check_classifier(model) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Only Keras models can be wrapped; expected a keras.Model; received "
            f"{type(model).__name__}"
        )
    check_single(model, "model")
    if not model.built:
        raise ValueError(
            "The model has no weights yet; expected a trained model, or one that was called on "
            f"images; received {type(model).__name__}"
        )


def _check_nothing_asked(model, outputs: str, pixels: str) -> None:
    if outputs == "probabilities" or pixels == "0..255":
        raise ValueError(
            "The model returns logits and knows its pixels; expected outputs and pixels of auto; "
            f"received outputs={outputs}, pixels={pixels} for {type(model).__name__}"
        )


def _probes(model) -> np.ndarray:
    shape = getattr(model, "input_shape", None) if getattr(model, "outputs", None) else None
    shape = shape or (model.get_build_config() or {}).get("input_shape")
    if not isinstance(shape, (tuple, list)) or not all(each is None or each > 0 for each in shape):
        raise ValueError(
            "The model does not say which images it takes; expected images=..., some clean ones; "
            f"received {type(model).__name__} with input_shape={shape!r}"
        )
    sides = [side or _ANY_SIDE for side in shape[1:]]
    return np.random.RandomState(0).rand(_NUM_PROBES, *sides).astype("float32")


def _answers(model, images: np.ndarray) -> np.ndarray:
    """What the model returns, as float32, in inference mode."""
    parts = []
    for first in range(0, len(images), _BATCH):
        with call_context(training=False):
            answer = model(images[first : first + _BATCH], training=False)
        if isinstance(answer, (list, tuple, dict)):
            raise ValueError(
                "The model has several outputs; expected one: take the one with the classes, "
                f"keras.Model(model.inputs, model.outputs[0]); received {len(answer)}"
            )
        parts.append(np.asarray(keras.ops.cast(answer, "float32")))
    answers = np.concatenate(parts)
    if answers.ndim != 2:
        raise ValueError(
            "Not a classifier; expected one number for each class; received outputs of shape "
            f"{answers.shape}"
        )
    return answers


def _kind(activation: str, answers: list[np.ndarray], outputs: str) -> str:
    """What the answers are: "logits", "softmax" or "sigmoid"; refuses to guess."""
    if activation in PROBABILITIES:
        if activation not in _UNDONE:
            raise ValueError(
                f"The model ends in {activation}, which cannot be undone; expected softmax, "
                f"sigmoid or logits at its end; received activation={activation!r}"
            )
        if outputs == "logits":
            raise ValueError(
                f"The model ends in a {activation}; expected outputs (--outputs) of auto or "
                "probabilities; received outputs=logits"
            )
        return activation
    values = np.concatenate(answers)
    tolerance = _HALF_TOLERANCE if _is_half(values) else _SUM_TOLERANCE
    within = bool(values.min() >= -tolerance and values.max() <= 1.0 + tolerance)
    sums = values.shape[1] > 1 and bool(np.all(np.abs(values.sum(axis=1) - 1.0) < tolerance))
    if outputs == "probabilities" or (outputs == "auto" and not activation and within and sums):
        if not within:
            raise ValueError(
                "The model does not return probabilities; expected values in [0, 1]; received "
                f"outputs=probabilities and values in [{values.min():.3g}, {values.max():.3g}]"
            )
        return "softmax" if sums else "sigmoid"
    if (within and sums) or (outputs == "auto" and (values.shape[1] == 1 or within)):
        raise ValueError(
            "The model's outputs may be probabilities or logits; expected outputs (--outputs) of "
            f"logits or probabilities; received outputs={outputs}, {values.shape[1]} "
            f"column(s) with values in [{values.min():.3g}, {values.max():.3g}]"
        )
    return "logits"


def _is_half(values: np.ndarray) -> bool:
    return bool(np.array_equal(values.astype(np.float16), values, equal_nan=True))


def _pixels(parts, kind: str, answers: dict, labels) -> tuple[str | None, str]:
    """The range of the model's pixels, or None, and how it is known."""
    shown = surgery.pixels_of_layers(parts.body) if parts else None
    if labels is None:
        if shown is None:
            return None, "neither images with labels nor a first layer that rescales them"
        return shown, f"its first layers show that it takes {shown}"
    labels = class_numbers(labels).reshape(-1)
    if len(labels) != len(answers[1.0]):
        raise ValueError(
            f"Images and labels differ in number; expected a label for each of the "
            f"{len(answers[1.0])} images; received {len(labels)} labels"
        )
    unit, wide = (_classes(answers[factor], kind) == labels for factor in (1.0, 255.0))
    figures = f"{unit.mean():.1%} of {len(labels)} clean images right in 0..1, {wide.mean():.1%} "
    figures += "in 0..255"
    chance = max(np.bincount(labels).max() / len(labels), 1.0 / max(answers[1.0].shape[1], 2))
    if max(unit.sum(), wide.sum()) < fewest_beyond(len(labels), chance, CHANCE_LEVEL):
        return shown or "0..1", f"{figures}: no better than chance"
    measured = _more_accurate(unit, wide, chance) or _by_confidence(
        answers[1.0], kind, (unit.mean() - chance) / (1.0 - chance)
    )
    if (shown or measured) != (measured or shown) or not (shown or measured):
        reason = f", but its first layers show {shown}" if shown else ""
        raise ValueError(
            "The pixels that the model takes are ambiguous; expected pixels (--pixels) of 0..1 or "
            f"0..255; received {figures}{reason}"
        )
    return shown or measured, figures


def _more_accurate(unit: np.ndarray, wide: np.ndarray, chance: float) -> str | None:
    """The range in which far more images are right, if that is no accident."""
    if mcnemar_p_value(int((unit & ~wide).sum()), int((wide & ~unit).sum())) >= _RARE:
        return None
    low, high = sorted((unit.mean() - chance, wide.mean() - chance))
    if high < _FAR_MORE * low:
        return None
    return "0..1" if unit.sum() > wide.sum() else "0..255"


def _by_confidence(answers: np.ndarray, kind: str, skill: float) -> str | None:
    """The range for which the confidence in 0..1 speaks, where the model is right in both.

    Many a network multiplies its logits by 255 if its pixels are, and answers alike. Trained on
    0..255, it is right in 0..1 and hardly confident. Other trainings do not leave that mark on
    logits, whose scale may be any.
    """
    logits = answers if kind == "logits" else np.log(np.maximum(answers, _TINY))
    if answers.shape[1] == 1:
        rest = (
            np.zeros_like(answers) if kind == "logits" else np.log(np.maximum(1 - answers, _TINY))
        )
        logits = np.concatenate([rest, logits], axis=1)
    shares = np.asarray(keras.ops.softmax(keras.ops.convert_to_tensor(logits)))
    least = 1.0 / shares.shape[1]
    confidence = (float(shares.max(axis=1).mean()) - least) / (1.0 - least)
    if skill <= 0.0:
        return None
    if confidence >= _CONFIDENT * skill:
        return "0..1"
    return "0..255" if kind != "logits" and confidence <= _IGNORANT * skill else None


def _classes(answers: np.ndarray, kind: str) -> np.ndarray:
    if answers.shape[1] > 1:
        return answers.argmax(axis=1)
    return (answers[:, 0] > (0.0 if kind == "logits" else 0.5)).astype(np.int64)


def wrapped_as_found(model, found: Inspection):
    """The model itself if nothing has to be done, else the first way that gives its answers."""
    if found.pixels is None:
        raise ValueError(
            "The pixels that the model takes are unknown; expected pixels (--pixels) of 0..1 or "
            "0..255, or clean images with labels (--data) to find out; received "
            f"{found.evidence}"
        )
    is_ready = found.kind == "logits" and found.factor == 1.0 and found.columns > 1
    if is_ready and not _rounds(model):
        return model
    causes = []
    for build in (_of_parts, _of_graph, _of_model):
        try:
            wrapped = build(model, found)
        except Exception as error:  # noqa: BLE001
            # Layers may be any code: some cannot be copied, others not be called on symbols.
            causes.append(reason_of(error))
            continue
        if wrapped is not None and _is_same(model, wrapped, found):
            return wrapped
    reason = f": {causes[-1]}" if causes else ""
    raise ValueError(
        "The model cannot be wrapped; expected a sequential or functional model, or one that Keras "
        f"can call on a symbolic tensor; received {type(model).__name__}{reason}"
    )


def _of_parts(model, found: Inspection):
    """Copies all but the last activation."""
    if found.parts is None or found.parts.activation not in ("linear", found.kind):
        return None
    images, entering, steps = _entrance(model, found)
    features = surgery.copied(found.parts.body, images, entering)
    head = found.parts.head
    logits = features if head is None else surgery.linear_copy(head)(features)
    if found.kind != "logits":
        steps.insert(0, f"{found.kind} removed")
    if found.columns == 1:
        steps.insert(1 if found.kind != "logits" else 0, "one unit became two classes")
        logits = _two_classes(logits) if head is None else logits
    return WrappedClassifier(images, logits, conversion="; ".join(steps), name=model.name)


def _of_graph(model, found: Inspection):
    """Copies all layers, and takes the logarithm."""
    graph = surgery.graph_of(model)
    if graph is None:
        return None
    return _with_logarithm(model, found, lambda *where: surgery.copied(graph, *where))


def _of_model(model, found: Inspection):
    """Calls the model itself, whose layers nobody sees, and takes the logarithm."""
    if _rounds(model):
        return None
    return _with_logarithm(model, found, lambda images, entering: model(entering))


def _with_logarithm(model, found: Inspection, run):
    images, entering, steps = _entrance(model, found)
    logits = run(images, entering)
    if found.kind != "logits":
        steps.insert(0, f"{found.kind} undone by a logarithm, as it cannot be removed")
        logits = _logarithm(logits, found.kind)
    if found.columns == 1:
        steps.insert(1 if found.kind != "logits" else 0, "one unit became two classes")
        logits = _two_classes(logits)
    return WrappedClassifier(images, logits, conversion="; ".join(steps), name=model.name)


def _entrance(model, found: Inspection):
    """The new input, what the model's layers take, and what was done so far."""
    shape = getattr(model, "input_shape", None) if getattr(model, "outputs", None) else None
    sides = (None, *found.probes.shape[1:]) if shape is None else tuple(shape)
    images = keras.Input(sides[1:], dtype="float32", name="images")
    entering, steps = images, []
    if found.factor != 1.0:
        rescaling = keras.layers.Rescaling(found.factor, dtype="float32", name="pixels_0_to_255")
        entering, steps = rescaling(images), ["images in 0..1 times 255"]
    if _rounds(model):
        steps.append("images not rounded to integers")
    return images, entering, steps


def _rounds(model) -> bool:
    """Whether the input of the model is one of integers, which have no gradient."""
    inputs = getattr(model, "inputs", None) or []
    return any("int" in keras.backend.standardize_dtype(each.dtype) for each in inputs)


def _logarithm(probabilities, kind: str):
    ops = keras.ops
    shares = ops.cast(probabilities, "float32")
    logs = ops.log(ops.maximum(shares, _TINY))
    return logs if kind == "softmax" else logs - ops.log(ops.maximum(1.0 - shares, _TINY))


def _two_classes(logits):
    logits = keras.ops.cast(logits, "float32")
    return keras.ops.concatenate([keras.ops.zeros_like(logits), logits], axis=-1)


def _is_same(model, wrapped, found: Inspection) -> bool:
    """Whether the wrapped model gives the answers of the model, up to rounding."""
    expected = _answers(model, _as_taken(found.probes, found.factor))
    logits = _answers(wrapped, found.probes)
    if found.columns == 1:
        logits = logits[:, 1:] - logits[:, :1]
    limit = _HALF_SAME if _is_half(expected) else _SAME
    if found.kind == "logits":
        return bool(np.all(np.abs(logits - expected) <= limit * max(float(expected.std()), 1e-6)))
    logits = keras.ops.convert_to_tensor(logits)
    shares = keras.ops.sigmoid(logits) if found.kind == "sigmoid" else keras.ops.softmax(logits)
    return bool(np.all(np.abs(np.asarray(shares) - expected) <= limit))
