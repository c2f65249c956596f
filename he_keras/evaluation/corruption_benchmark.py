"""Accuracy under common corruptions: generated ones, or the published files of CIFAR-10-C.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019. Official numbers come from the published files. Generated images use the
same parameters and other random numbers; `docs/reference/corruptions.md` lists the deviations.

Example:
    >>> import numpy as np, tensorflow as tf
    >>> from he_keras.evaluation.corruption_benchmark import evaluate_corruptions
    >>> def is_bright(images):
    ...     level = tf.reduce_mean(images, axis=[1, 2, 3])
    ...     return tf.stack([0.59 - level, level - 0.59], axis=1)
    >>> grey = np.full((4, 32, 32, 3), 0.5, "float32")
    >>> report = evaluate_corruptions(is_bright, (grey, np.zeros(4, int)), ["brightness"])
    >>> report.accuracy["brightness"], report.mean_corruption_accuracy
    ((1.0, 0.0, 0.0, 0.0, 0.0), 0.2)
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from he_keras.arguments import check_positive_integer
from he_keras.attacks import Victim
from he_keras.attacks.framework.result import is_wrong
from he_keras.attacks.framework.victim import check_class_numbers
from he_keras.data import corruptions as corruption_set
from he_keras.data.corruptions.published import NpyFiles, TfdsConfigurations
from he_keras.evaluation.run.cost import CostPart
from he_keras.evaluation.run.examples import DataDigest, Examples
from he_keras.evaluation.run.facts import brief, model_facts
from he_keras.status_line import StatusLine
from he_keras.threat import UNIT_BOUNDS, ThreatModel, bounds_of, from_unit

#: AlexNet's mean errors on ImageNet-C over the severities (the paper's code): divisors of the mCE.
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}

_CLEAN = ("clean", 0)
#: So many images, and then so many, tell what one more image takes.
_PROBED = (2, 10)
Key = tuple[str, int]
_Batch = tuple[Key, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class CorruptionReport:
    """The result of `evaluate_corruptions`.

    Attributes:
        source: where the corrupted images came from, and which frost was used.
        num_images: images for each corruption and severity.
        severities: the severities that were evaluated.
        accuracy: for each corruption one accuracy for each of the severities.
        clean_accuracy: share of the uncorrupted images classified correctly, where they were given.
        seed: seed of the generated corruptions.
        baseline_errors: mean errors of the baseline, for the mCE.
        model: facts of the model.
        bounds: smallest and largest pixel value of the images that the model took.
        data: the digest of the uncorrupted images and labels. None where they were not given, are
            only the first ones, or have other bounds than [0, 1].
    """

    source: str
    num_images: int
    severities: tuple[int, ...]
    accuracy: dict[str, tuple[float, ...]] = dataclasses.field(repr=False)
    clean_accuracy: float | None = None
    seed: int = 0
    baseline_errors: dict[str, float] | None = dataclasses.field(default=None, repr=False)
    model: dict | None = None
    bounds: tuple[float, float] = UNIT_BOUNDS
    data: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all fifteen corruptions were evaluated at all five severities."""
        all_fifteen = set(corruption_set.CORRUPTIONS) <= set(self.accuracy)
        return all_fifteen and set(self.severities) == set(corruption_set.SEVERITIES)

    @property
    def mean_corruption_accuracy(self) -> float | None:
        """The HE paper's mCA: the plain mean over fifteen corruptions and five severities.

        Noise is included, which the paper's Table 5 leaves out. Of an incomplete evaluation it is
        the mean over what there is, which is no mCA.
        """
        return self._mean_over(corruption_set.CORRUPTIONS)

    @property
    def mean_extra_accuracy(self) -> float | None:
        """The mean over the four extra corruptions, or over what there is of them."""
        return self._mean_over(corruption_set.EXTRA_CORRUPTIONS)

    @property
    def mean_corruption_error(self) -> float | None:
        """The mCE: for each of the fifteen its error over the baseline's, then the mean."""
        baseline = self.baseline_errors
        if baseline is None:
            return None
        names = [name for name in corruption_set.CORRUPTIONS if name in self.accuracy]
        ratios = [(1.0 - float(np.mean(self.accuracy[name]))) / baseline[name] for name in names]
        return float(np.mean(ratios)) if ratios else None

    def _mean_over(self, names: Sequence[str]) -> float | None:
        rows = [self.accuracy[name] for name in names if name in self.accuracy]
        return float(np.mean(rows)) if rows else None

    def to_json(self) -> dict:
        """Returns the "corruptions" part of report.json."""
        return {
            "source": self.source,
            "num_images": self.num_images,
            "severities": list(self.severities),
            "is_complete": self.is_complete,
            "clean_accuracy": self.clean_accuracy,
            "mean_corruption_accuracy": self.mean_corruption_accuracy,
            "mean_extra_accuracy": self.mean_extra_accuracy,
            "mean_corruption_error": self.mean_corruption_error,
            "seed": self.seed,
            "model": self.model,
            "bounds": list(self.bounds),
            "data": self.data,
            "accuracy": {name: list(row) for name, row in self.accuracy.items()},
        }

    def table(self) -> str:
        """Returns the report as a text table."""
        header = "".join(f"{severity:>9}" for severity in self.severities)
        low, high = self.bounds
        lines = [f"Accuracy by severity; no adversary, pixels {low:g} to {high:g}"]
        lines += [f"{'corruption':<20}{header}{'mean':>9}"]
        for name, row in self.accuracy.items():
            cells = "".join(f"{value:>9.2%}" for value in (*row, float(np.mean(row))))
            lines.append(f"{name:<20}{cells}")
        complete = "mCA (15 corruptions x 5 severities)"
        title = complete if self.is_complete else "mean of these (not the mCA of all 15 x 5)"
        for label, value in (
            ("clean", self.clean_accuracy),
            (title, self.mean_corruption_accuracy),
            ("mean of the extra corruptions", self.mean_extra_accuracy),
            ("mCE relative to the baseline", self.mean_corruption_error),
        ):
            if value is not None:
                lines.append(f"({label}) {value:.2%}")
        lines.append(f"n = {self.num_images} images each; {self.source}")
        return "\n".join(lines)


def evaluate_corruptions(
    model,
    examples=None,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] = corruption_set.SEVERITIES,
    source: str | os.PathLike[str] = "generated",
    batch_size: int = 250,
    num_examples: int | None = None,
    seed: int = 0,
    frost_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    baseline_errors: Mapping[str, float | Sequence[float]] | None = None,
    show_progress: bool = False,
    bounds: tuple[float, float] | None = None,
) -> CorruptionReport:
    """Measures accuracy under every corruption at every severity; see the file's example.

    Args:
        model: a `keras.Model` or a callable from images to logits; NaN counts as wrong.
        examples: (images, labels), a data set of `he_keras.data`, or a `tf.data.Dataset` of such
            batches, in [0, 1] or uint8. Where files have the images, only for clean accuracy.
        corruptions: names. Defaults to the fifteen and the four extra ones.
        severities: some of 1 to 5.
        source: "generated", the folder of the published .npy files, or "tfds": cifar10_corrupted.
        batch_size: examples per compiled call.
        num_examples: how many of each set, from the first on; None for all.
        seed: seed of the generated corruptions.
        frost_dir: folder of pictures for the generated frost.
        data_dir: folder of prepared TFDS data sets.
        baseline_errors: a baseline's, for the mCE: `ALEXNET_ERRORS`, or one for each severity.
        show_progress: show a progress bar.
        bounds: of the model's images; default: what it was trained on, else [0, 1].
    """
    keys = _check_chosen(corruptions, severities)
    check_positive_integer("batch_size", batch_size)
    check_positive_integer("num_examples", 1 if num_examples is None else num_examples)
    baseline = _mean_errors(baseline_errors, keys)
    checked = None if examples is None else _examples(examples, batch_size)
    if isinstance(source, str) and source == "generated":
        corrupt = _Corruptor(keys, seed, frost_dir)
        batches, text = _generated(checked, num_examples, corrupt), corrupt.description
    else:
        files = _open_files(source, keys, data_dir)
        batches, text = _stored(files, keys, checked, num_examples, batch_size), files.description
    bounds = bounds_of(model, bounds)
    sets = len(keys), _num_images(keys, checked, num_examples) if show_progress else 0
    counts, data = _count(model, bounds, batches, sets, show_progress)
    data = data if num_examples is None and bounds == UNIT_BOUNDS else None
    facts = {"bounds": bounds, "seed": int(seed), "model": brief(model_facts(model)), "data": data}
    return _report(counts, keys, source=text, baseline_errors=baseline, **facts)


def cost_of_corruptions(model, dataset, **options) -> CostPart:
    """Returns what `evaluate_corruptions` of a data set will cost, by its first images.

    Args:
        model: a `keras.Model` or a callable from images to logits.
        dataset: a data set of `he_keras.data`.
        **options: of `evaluate_corruptions`.
    """
    few, more = _PROBED
    seconds, count = [], len(dataset)
    for each in (few, few, more):
        began = time.perf_counter()
        report = evaluate_corruptions(model, dataset.take(each), num_examples=each, **options)
        seconds.append(time.perf_counter() - began)
    # The first time loads what is loaded once.
    per_image = max(seconds[2] - seconds[1], 0.0) / (more - few)
    sets = 1 + sum(map(len, report.accuracy.values()))
    return CostPart("corruptions", count * sets, seconds[1] + (count - few) * per_image)


def _num_images(keys: list[Key], examples: Examples | None, num_examples: int | None) -> int:
    """Returns how many images there are in all sets; 0 where only the files know."""
    known = 0 if examples is None else len(examples)
    return min(num_examples or known, known) * (1 + len(keys))


def _report(counts: dict, keys: list[Key], **facts) -> CorruptionReport:
    shares = {key: right / total for key, (right, total) in counts.items()}
    names, severities = _names_and_severities(keys)
    return CorruptionReport(
        num_images=counts[keys[0]][1],
        severities=severities,
        accuracy={name: tuple(shares[name, severity] for severity in severities) for name in names},
        clean_accuracy=shares.get(_CLEAN),
        **facts,
    )


def _names_and_severities(keys: list[Key]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, severities = zip(*keys, strict=True)
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(severities))


def _check_chosen(names, severities) -> list[Key]:
    """Returns the pairs (corruption, severity) to evaluate."""
    if names is None:
        names = (*corruption_set.CORRUPTIONS, *corruption_set.EXTRA_CORRUPTIONS)
    if isinstance(names, str) or not isinstance(severities, Iterable):
        raise TypeError(
            "Invalid corruptions or severities; expected a sequence of each; received "
            f"corruptions={names!r}, severities={severities!r}"
        )
    names, severities = tuple(names), tuple(severities)
    for label, values in (("corruptions", names), ("severities", severities)):
        if not values or len(set(values)) != len(values):
            raise ValueError(
                f"Invalid {label}; expected at least one, none twice; received {label}={values}"
            )
    for name in names:
        for severity in severities:
            corruption_set.check_corruption(name, severity)
    return [(name, int(severity)) for name in names for severity in severities]


def _mean_errors(baseline, keys: list[Key]) -> dict[str, float] | None:
    """Returns the baseline's mean error for each of the evaluated corruptions among the fifteen."""
    if baseline is None:
        return None
    names, severities = _names_and_severities(keys)
    means = {}
    for name in names:
        if name not in corruption_set.CORRUPTIONS:
            continue
        errors = np.asarray(baseline.get(name, np.nan), float)
        is_complete = set(severities) == set(corruption_set.SEVERITIES)
        fits = errors.shape == (len(severities),) or (errors.shape == () and is_complete)
        if not fits or not np.all((errors >= 0) & (errors <= 1)) or errors.mean() == 0:
            raise ValueError(
                "Invalid baseline_errors; expected for each corruption one error in [0, 1] for "
                "each severity, or their mean if all five are evaluated, not all 0; received "
                f"{baseline.get(name)!r} for {name}"
            )
        means[name] = float(errors.mean())
    return means


def _examples(examples, batch_size: int) -> Examples:
    if isinstance(examples, (tuple, list)) and len(examples) == 2:
        images, labels = np.asarray(examples[0]), examples[1]
        if images.dtype == np.uint8:
            images = images.astype(np.float32) / np.float32(255.0)
        examples = (images, labels)
    return Examples(ThreatModel(), examples, batch_size)


class _Corruptor:
    """Applies every corruption to a batch of numbered images."""

    def __init__(self, keys: list[Key], seed, frost_dir) -> None:
        self.keys, self.seed, self.frost_dir = keys, seed, frost_dir
        self.description = "generated"
        if any(name == "frost" for name, _ in keys):
            self.description += f", {corruption_set.describe_frost(frost_dir)}"

    def __call__(self, images, name: str, severity: int, positions) -> np.ndarray:
        return corruption_set.corrupt(
            images, name, severity, self.seed, positions, frost_dir=self.frost_dir
        )


def _generated(
    examples: Examples | None, num_examples: int | None, corrupt: _Corruptor
) -> Iterator[_Batch]:
    """Returns the batches: each as it is, then with every corruption."""
    if examples is None:
        raise ValueError("No examples; expected examples to corrupt; received examples=None")
    # If the images cannot be corrupted, or seed or frost pictures are wrong, this fails at once.
    for images, _ in examples:
        for name, severity in corrupt.keys:
            corrupt(_as_uint8(images[:1]), name, severity, np.zeros(1, int))
        break
    return _corrupted(_first(examples, num_examples), corrupt)


def _corrupted(batches, corrupt: _Corruptor) -> Iterator[_Batch]:
    for positions, images, labels in batches:
        yield _CLEAN, images, labels
        pixels = _as_uint8(images)
        for name, severity in corrupt.keys:
            yield (name, severity), corrupt(pixels, name, severity, positions), labels


def _as_uint8(images: np.ndarray) -> np.ndarray:
    return np.rint(images * 255.0).astype(np.uint8)


def _first(examples: Examples, num_examples: int | None):
    """Yields (positions, images, labels) of the first examples."""
    position = 0
    for images, labels in examples:
        left = len(labels) if num_examples is None else num_examples - position
        if left <= 0:
            return
        labels = labels[:left]
        yield np.arange(position, position + len(labels)), images[:left], labels
        position += len(labels)


def _open_files(source, keys: list[Key], data_dir) -> NpyFiles | TfdsConfigurations:
    if isinstance(source, str) and source == "tfds":
        return TfdsConfigurations(data_dir, keys)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f'Invalid source; expected "generated", "tfds" or a folder; received source={source!r}'
        )
    return NpyFiles(source, _names_and_severities(keys)[0])


def _stored(
    files, keys: list[Key], examples: Examples | None, num_examples: int | None, batch_size: int
) -> Iterator[_Batch]:
    """Yields the batches of the files, after the clean ones if there are any."""
    if examples is not None:
        for _, images, labels in _first(examples, num_examples):
            yield _CLEAN, images, labels
    for name, severity in keys:
        images, labels = files.read(name, severity)
        images, labels = images[:num_examples], labels[:num_examples]
        for first in range(0, len(labels), batch_size):
            rows = slice(first, first + batch_size)
            yield (name, severity), np.asarray(images[rows]), labels[rows]


def _count(
    model, bounds, batches, sets: tuple[int, int], show_progress: bool
) -> tuple[dict, str | None]:
    """Returns how many of each set were right, and of how many; and a digest of clean images.

    Args:
        model: the model.
        bounds: of the images that it takes.
        batches: of images, with the set that they belong to.
        sets: how many sets there are, and how many images in all; 0 where nobody knows.
        show_progress: show a progress bar.
    """
    num_sets, total = sets
    victim, predict, num_classes = Victim(model), None, 0
    counts: dict[Key, tuple[int, int]] = {}
    digest, line, done = DataDigest(), StatusLine("corruptions", show_progress), 0
    for key, images, labels in batches:
        if images.dtype == np.uint8:
            images = images.astype(np.float32) / np.float32(255.0)
        images = from_unit(images.astype(np.float32, copy=False), bounds)
        if predict is None:
            num_classes = victim.logits(tf.constant(images[:1])).shape[-1]
            predict = _compiled(victim, images.shape[1:])
        check_class_numbers(labels, num_classes)
        if key == _CLEAN:
            digest.update(images, labels)
        correct = predict(tf.constant(images), tf.constant(labels, tf.int32)).numpy()
        right, seen = counts.get(key, (0, 0))
        counts[key] = right + int(correct.sum()), seen + len(labels)
        done += len(labels)
        # Files are read one after the other, and tell their size when they are read.
        place = (done, total) if total else (len(counts), num_sets + 1)
        line.count(*place, " ".join(map(str, key)))
    line.close()
    if not counts:
        raise ValueError("No examples; expected at least one; received 0")
    return counts, digest.text() if _CLEAN in counts else None


def _compiled(victim: Victim, image_shape):
    return tf.function(
        lambda images, labels: ~is_wrong(victim.for_many_passes().logits(images), labels),
        input_signature=[
            tf.TensorSpec([None, *image_shape], tf.float32),
            tf.TensorSpec([None], tf.int32),
        ],
    )
