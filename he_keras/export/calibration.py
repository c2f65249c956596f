"""Temperature calibration: one number that makes probabilities mean what they say.

Paper: Guo et al. 2017, "On calibration of modern neural networks". The logits are divided by one
temperature T before the softmax. T minimises the negative log-likelihood of held-out images.
Neither the logits nor the order of the classes change, so accuracies and attacks stay the same.

The scale s of a hypersphere head limits how confident its softmax can be. It was chosen for
training, not for well-calibrated probabilities.
"""

import dataclasses

import numpy as np

from he_keras.attacks import Victim
from he_keras.attacks.framework.victim import check_class_numbers
from he_keras.data import eval_pipeline, load
from he_keras.threat import bounds_of, from_unit

NUM_BINS = 15
_SMALLEST, _LARGEST = np.log(0.01), np.log(100.0)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A fitted temperature, and what it changed on the images that it was fitted to.

    Attributes:
        temperature: divides the logits.
        data: name of the data set.
        split: name of its split; never "test".
        num_examples: how many images there were.
        nll_before: mean negative log-likelihood of the softmax of the logits.
        nll_after: the same with the temperature.
        ece_before: expected calibration error, in 15 bins of equal width, without the temperature.
        ece_after: the same with the temperature.
    """

    temperature: float
    data: str
    split: str
    num_examples: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float

    def summary(self) -> str:
        """Returns one line."""
        return (
            f"temperature {self.temperature:.4f}, expected calibration error "
            f"{self.ece_before:.4f} -> {self.ece_after:.4f} on {self.num_examples} images "
            f"({self.data}, {self.split})"
        )


def calibrate(model, dataset, batch_size: int = 250, bounds=None) -> Calibration:
    """Fits the temperature of a model's probabilities.

    Args:
        model: a classifier that returns logits.
        dataset: held-out images: a data set of `he_keras.data` (not its test split), or two arrays
            (images, labels). Images are in [0, 1] or uint8.
        batch_size: images per pass.
        bounds: the bounds of the model's images; default: those of its training, otherwise [0, 1].

    Example:
        >>> import numpy as np, tensorflow as tf
        >>> from he_keras.export import calibrate
        >>> images = np.zeros([4, 1, 1, 1], "float32")
        >>> overconfident = lambda images: tf.repeat([[4.0, 0.0]], len(images), axis=0)
        >>> round(calibrate(overconfident, (images, np.array([0, 0, 0, 1]))).temperature, 3)
        3.641
    """
    if isinstance(dataset, tuple):
        dataset = dataclasses.replace(load(dataset, "all"), split="validation")
    if dataset.split == "test":
        raise ValueError(
            "The test set is not for calibration, because its images would not be unseen any more; "
            f"expected held-out training images; received split={dataset.split!r}"
        )
    logits, labels = _answers(model, dataset, batch_size, bounds_of(model, bounds))
    temperature = fit_temperature(logits, labels)
    return Calibration(
        temperature,
        dataset.name,
        dataset.split,
        len(labels),
        negative_log_likelihood(logits, labels),
        negative_log_likelihood(logits / temperature, labels),
        expected_calibration_error(logits, labels),
        expected_calibration_error(logits / temperature, labels),
    )


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature with the smallest negative log-likelihood."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(logits / np.exp(log_temperature), labels)

    ends = _SMALLEST, _LARGEST
    found = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-7})
    if not loss(found.x) < min(map(loss, ends)):
        accuracy = float((logits.argmax(axis=1) == labels).mean())
        raise ValueError(
            "No temperature fits these images best; expected some that the model classifies "
            f"wrongly, and more that it classifies correctly; received accuracy={accuracy:.4f} on "
            f"{len(labels)} images"
        )
    return float(np.exp(found.x))


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean of `-log softmax(logits)[label]`."""
    return float(-_log_softmax(logits)[np.arange(len(labels)), labels].mean())


def expected_calibration_error(logits, labels) -> float:
    """Returns the mean distance between confidence and accuracy, over bins of confidence.

    Bins have equal width; each weighs as much as it has images.

    Example:
        >>> import numpy as np
        >>> from he_keras.export.calibration import expected_calibration_error
        >>> logits = np.log([[0.9, 0.1], [0.9, 0.1]])
        >>> round(expected_calibration_error(logits, np.array([0, 1])), 3)
        0.4
    """
    probabilities = np.exp(_log_softmax(logits))
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    # A confidence of exactly 1 belongs to the last bin.
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [abs(np.sum(confidence[bins == each] - right[bins == each])) for each in set(bins)]
    return float(np.sum(gaps) / len(labels))


def _log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _answers(model, dataset, batch_size: int, bounds) -> tuple[np.ndarray, np.ndarray]:
    """The logits and the labels of a data set."""
    victim = Victim(model)
    logits, labels = [], []
    for images, truth in eval_pipeline(dataset, batch_size):
        logits.append(victim.logits(from_unit(images, bounds)).numpy())
        labels.append(truth.numpy())
    joined = np.concatenate(labels)
    check_class_numbers(joined, logits[0].shape[1])
    return np.concatenate(logits), joined
