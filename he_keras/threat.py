"""The threat model: which perturbations an attacker may add to an image.

A threat model is an l_p ball of radius `epsilon` around the clean image, intersected with the box
of legal pixel values. What depends on the norm lives here and in `he_keras.balls`, so that no
attack is written twice.
"""

import math
import numbers
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import balls
from he_keras.arguments import check_choice, parse_epsilon
from he_keras.balls import NORMS

#: Bounds of the images of `he_keras.data`.
UNIT_BOUNDS = (0.0, 1.0)
#: How far pixels may lie outside the bounds, as a share of their width.
_BOUND_TOLERANCE = 1e-6
#: Standard deviation of the released HE and TRADES training start, as a share of the bounds.
GAUSSIAN_START = 0.001


@keras.saving.register_keras_serializable(package="he_keras")
class ThreatModel:
    """An l_p ball of radius `epsilon` around each image, inside the pixel bounds.

    Args:
        norm: "linf", "l2" or "l1".
        epsilon: the radius, in the units of the images: a number or a fraction such as "8/255".
        bounds: smallest and largest legal pixel value.

    All three are attributes, and do not change.

    Example:
        >>> import he_keras as he
        >>> he.ThreatModel("linf", "51/255").epsilon
        0.2
    """

    norm: str
    epsilon: Any
    bounds: tuple[float, float]

    def __init__(
        self,
        norm: str = "linf",
        epsilon: float | str = "8/255",
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        check_choice("norm", norm, NORMS)
        low, high = _checked_bounds(bounds)
        radius = parse_epsilon(epsilon)
        if radius <= 0:
            raise ValueError(
                f"epsilon must be positive; expected > 0; received epsilon={epsilon!r}"
            )
        if norm == "linf" and radius > high - low:
            raise ValueError(
                f"epsilon is wider than the pixel bounds; expected at most {high - low} for "
                f'bounds=({low}, {high}) (for 8-bit pixel units write "8/255"); '
                f"received epsilon={epsilon!r}"
            )
        vars(self).update(norm=norm, epsilon=radius, bounds=(low, high))

    def __setattr__(self, name: str, value) -> None:
        """Refuses: attacks are compiled for the threat model that they were built with."""
        raise AttributeError(
            "ThreatModel does not change after it is built; expected a new one, built with "
            f"{name}={value!r:.60}; received an assignment to {name}"
        )

    @property
    def width(self) -> float:
        """How far the bounds are apart."""
        return self.bounds[1] - self.bounds[0]

    def from_unit(self, images):
        """Returns images in [0, 1], as data sets have them, in the units of the bounds."""
        return from_unit(images, self.bounds)

    def to_unit(self, images):
        """Returns images in the units of the bounds as images in [0, 1]."""
        return images if self.bounds == UNIT_BOUNDS else (images - self.bounds[0]) / self.width

    def random_start(self, images, seed, radius: float | None = None):
        """Draws uniformly from the ball of `radius` (default epsilon), then clips to the box.

        The l2 and l1 draws are uniform in volume. The l2 draw has the direction of a Gaussian and
        the length `radius * u**(1/D)`. The l1 draw is signed exponentials, divided by their sum
        plus one more exponential.

        Args:
            images: clean images, `(n, ...)`.
            seed: int tensor of shape `(2,)` for one draw over the whole batch. With `(n, 2)`, each
                example is drawn from its own seed, so that batching does not change the result.
            radius: radius of the ball to draw from.
        """
        images = tf.convert_to_tensor(images)
        radius = self.epsilon if radius is None else radius
        noise = balls.draw_per_seed(balls.UNIT_BALL[self.norm], images, seed)
        return self.clip_to_bounds(images + tf.cast(radius, images.dtype) * noise)

    def start(self, random_start: bool | float | str, images, seeds):
        """Returns the first iterate of an attack.

        Args:
            random_start: True draws uniformly from the ball. A number, or a scalar tensor, is the
                radius of a uniform draw. False returns the images. "gaussian" adds 0.001 * N(0, I)
                without clipping.
            images: clean images, `(n, ...)`.
            seeds: as for `random_start`.
        """
        if random_start is False:
            return images
        if isinstance(random_start, str):
            noise = balls.draw_per_seed(balls.standard_normal, images, seeds)
            return images + GAUSSIAN_START * self.width * noise
        radius = None if random_start is True else random_start
        return self.random_start(images, seeds, radius)

    def steepest_step(self, gradient):
        """Returns the step of unit length that raises a linear function most: see `balls`."""
        return balls.steepest_step(gradient, self.norm)

    def project(self, x_adv, images):
        """Maps `x_adv` into the ball around `images`, then into the box.

        linf and l1 are exact Euclidean projections onto ball and box together. l2 scales the
        perturbation down and then clips, as AutoAttack and cleverhans do: feasible, not nearest.
        """
        perturbation = x_adv - images
        if self.norm == "l1":
            low, high = self.bounds
            room = tf.where(perturbation > 0, high - images, images - low)
            perturbation = balls.project_l1(perturbation, room, self.epsilon)
        else:
            perturbation = self.project_perturbation(perturbation)
        return self.clip_to_bounds(images + perturbation)

    def project_perturbation(self, perturbation):
        """Maps a perturbation to the nearest point of the l_p ball, whatever the pixel bounds."""
        return balls.project(perturbation, self.norm, self.epsilon)

    def clip_to_bounds(self, images):
        """Clips pixel values to the legal range."""
        return tf.clip_by_value(images, *self.bounds)

    def distance(self, x_adv, images):
        """Returns the l_p length of each example's perturbation, shape `(n,)`."""
        return tf.reshape(balls.length(x_adv - images, self.norm), [-1])

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {"norm": self.norm, "epsilon": self.epsilon, "bounds": list(self.bounds)}

    @classmethod
    def from_config(cls, config: dict) -> "ThreatModel":
        """Builds a threat model from `get_config()`'s result."""
        return cls(**config)

    def text(self) -> str:
        """The threat model in one line, for the headings of tables.

        Example:
            >>> import he_keras as he
            >>> he.ThreatModel("linf", "8/255").text()
            'linf, epsilon 8/255 (0.03137), pixels 0 to 1'
        """
        fraction = fraction_of_255(self.epsilon)
        is_usual = self.norm == "linf" and self.bounds == UNIT_BOUNDS and fraction
        radius = f"{fraction} ({self.epsilon:.4g})" if is_usual else f"{self.epsilon:.6g}"
        low, high = self.bounds
        return f"{self.norm}, epsilon {radius}, pixels {low:g} to {high:g}"

    def __eq__(self, other) -> bool:
        return isinstance(other, ThreatModel) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((self.norm, self.epsilon, self.bounds))

    def __repr__(self) -> str:
        return f"ThreatModel(norm={self.norm!r}, epsilon={self.epsilon:.6g}, bounds={self.bounds})"


def checked_start(random_start, allows_gaussian: bool = True) -> bool | float | str:
    """Returns True, False, "gaussian" or a positive radius, as plain Python values."""
    if isinstance(random_start, (bool, np.bool_)):
        return bool(random_start)
    if allows_gaussian and isinstance(random_start, str) and random_start == "gaussian":
        return random_start
    if isinstance(random_start, numbers.Real) and 0 <= float(random_start) < math.inf:
        return float(random_start) or False
    last = 'a radius or "gaussian"' if allows_gaussian else "or a radius"
    raise ValueError(
        f"Invalid random_start; expected True, False, {last}; "
        f"received random_start={random_start!r}"
    )


def check_threat(threat) -> None:
    """Raises a TypeError unless `threat` is a `ThreatModel`."""
    if not isinstance(threat, ThreatModel):
        raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")


def check_examples(threat: ThreatModel, images, labels) -> tuple[np.ndarray, np.ndarray]:
    """Returns images as float arrays and labels as int32, or says what is wrong with them.

    Images that need no change are not copied: an ensemble and its attacks hold the same array.
    """
    _check_single_input(images, labels)
    images = np.asarray(images)
    labels = np.asarray(labels)
    if not np.issubdtype(images.dtype, np.floating) or images.ndim < 2:
        raise ValueError(
            "Invalid images; expected floating-point values of shape (n, ...); received "
            f"dtype={images.dtype}, shape={images.shape}"
        )
    if labels.shape == (len(images), 1):
        labels = labels[:, 0]
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"Invalid labels; expected integers of shape ({len(images)},); received "
            f"dtype={labels.dtype}, shape={labels.shape}"
        )
    if len(images) == 0:
        raise ValueError("No examples; expected at least one image; received 0")
    if labels.min() < 0:
        raise ValueError(f"Negative label; expected labels >= 0; received {labels.min()}")
    is_within = _check_range(images, *threat.bounds)
    received = images.dtype
    if received != np.float64:
        images = images.astype(np.float32, copy=False)
    labels = np.minimum(labels.astype(np.int64), np.iinfo(np.int32).max).astype(np.int32)
    # Rounding to float32 may lead out of the bounds as well.
    is_same = is_within and images.dtype == received
    return images if is_same else np.clip(images, *threat.bounds), labels


def _check_single_input(images, labels) -> None:
    """Raises a ValueError for images that are several inputs, each as long as the labels."""
    if isinstance(images, (list, tuple)):
        lengths = {len(each) if np.ndim(each) else 0 for each in images}
        if len(images) == len(labels) or lengths != {len(labels)}:
            return
    elif not isinstance(images, dict):
        return
    raise ValueError(
        "The examples hold several inputs; expected one array of images: attack a model that takes "
        f"the images and holds the rest fixed; received {len(images)} inputs"
    )


def _check_range(images: np.ndarray, low: float, high: float) -> bool:
    """Whether all pixels lie exactly within the bounds; an error if some lie far outside."""
    smallest, largest = float(images.min()), float(images.max())
    tolerance = _BOUND_TOLERANCE * (high - low)
    if not low - tolerance <= smallest <= largest <= high + tolerance:
        raise ValueError(
            f"Images outside the threat model's bounds (or NaN); expected values in [{low}, {high}]"
            ", with any normalisation inside the model; "
            f"received values in [{smallest}, {largest}]"
        )
    return low <= smallest and largest <= high


def fraction_of_255(epsilon: float) -> str | None:
    """Writes a radius such as 0.0314 as "8/255", where it is one of 255 or 510 equal parts."""
    halves = epsilon * 510.0
    if round(halves) < 1 or abs(halves - round(halves)) > 1e-3:
        return None
    return f"{round(halves) / 2:g}/255"


def from_unit(images, bounds: tuple[float, float]):
    """Returns images in [0, 1], as data sets have them, in the units of the bounds.

    Example:
        >>> import numpy as np
        >>> from he_keras.threat import from_unit
        >>> from_unit(np.array([0.0, 0.5, 1.0]), (-1.0, 1.0))
        array([-1.,  0.,  1.])
    """
    low, high = bounds
    return images if tuple(bounds) == UNIT_BOUNDS else images * (high - low) + low


def trained_threat(model) -> ThreatModel | None:
    """Returns the threat model that a model was trained with, where it knows one."""
    owner = getattr(model, "objective", model)
    threat = getattr(owner, "threat", None)
    return threat if isinstance(threat, ThreatModel) else None


def bounds_of(model, bounds=None) -> tuple[float, float]:
    """Returns the bounds of a model's images: what it knows, else those given, else [0, 1]."""
    trained = trained_threat(model)
    known = trained.bounds if trained is not None else getattr(model, "bounds", None)
    given = None if bounds is None else _checked_bounds(bounds)
    if known is not None and given is not None and tuple(known) != given:
        raise ValueError(
            "Other pixel values than the model was trained on; expected a threat model with "
            f"bounds={tuple(known)}, and epsilon in these units; received bounds={given}"
        )
    return tuple(known or given or UNIT_BOUNDS)


def with_radius(threat: ThreatModel, epsilon) -> ThreatModel:
    """Returns a threat model of another radius, unchecked: a scalar tensor that may be zero.

    For use inside a training step only, where `epsilon` follows a schedule.
    """
    resized = object.__new__(ThreatModel)
    vars(resized).update({**vars(threat), "epsilon": epsilon})
    return resized


def _checked_bounds(bounds) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"Invalid bounds; expected (low, high) with low < high; received bounds={bounds!r}"
        )
    return low, high
