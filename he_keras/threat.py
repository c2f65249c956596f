"""The threat model: which perturbations an attacker may add to an image.

A threat model is an l_p ball of radius `epsilon` around the clean image, intersected with the
box of legal pixel values. Everything that depends on the norm lives here, in four methods
(`random_start`, `steepest_step`, `project`, `distance`), so that no attack is written twice.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Lemma 1 (Eq. 7): the step of
unit l_p length that increases a linear function most is `U_p(g) = argmax <g, v>` over the unit
ball; its value is the dual norm of `g`.
"""

import copy
import math

import keras
import numpy as np
import tensorflow as tf

NORMS = ("linf", "l2", "l1")
_NORM_FLOOR = 1e-12
_BISECTION_STEPS = 40
_ZERO_RADIUS = 1e-37


def parse_epsilon(value: float | int | str) -> float:
    """Reads a perturbation size given as a number or as a fraction such as "8/255".

    Example:
        >>> from he_keras.threat import parse_epsilon
        >>> parse_epsilon("51/255")
        0.2
    """
    try:
        if isinstance(value, str):
            numerator, slash, denominator = value.partition("/")
            number = float(numerator) / float(denominator) if slash else float(numerator)
        else:
            number = float(value)
    except (TypeError, ValueError, ArithmeticError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            'Invalid perturbation size; expected a finite number or a fraction such as "8/255"; '
            f"received value={value!r}"
        )
    return number


@keras.saving.register_keras_serializable(package="he_keras")
class ThreatModel:
    """An l_p ball of radius `epsilon` around each image, inside the pixel bounds.

    Args:
        norm: "linf", "l2" or "l1".
        epsilon: the radius, in the units of the images: a number or a fraction such as "8/255".
        bounds: smallest and largest legal pixel value.

    Example:
        >>> import he_keras as he
        >>> he.ThreatModel("linf", "51/255").epsilon
        0.2
    """

    def __init__(
        self,
        norm: str = "linf",
        epsilon: float | str = "8/255",
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if norm not in NORMS:
            raise ValueError(f"Unknown norm; expected one of {NORMS}; received norm={norm!r}")
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
        self.norm = norm
        self.epsilon = radius
        self.bounds = (low, high)

    def random_start(self, images, seed, radius: float | None = None):
        """Draws uniformly from the ball of `radius` (default epsilon), then clips to the box.

        The l2 draw is uniform in volume (direction of a Gaussian, length `radius * u**(1/D)`), the
        l1 draw too (signed exponentials divided by their sum plus one more exponential).

        Args:
            images: clean images, `(n, ...)`.
            seed: int tensor of shape `(2,)` for one draw over the whole batch, or `(n, 2)` to draw
                each example from its own seed, which makes the result independent of batching.
            radius: radius of the ball to draw from.
        """
        images = tf.convert_to_tensor(images)
        radius = self.epsilon if radius is None else radius
        noise = draw_per_seed(_BALL_SAMPLERS[self.norm], images, seed)
        return self.clip_to_bounds(images + tf.cast(radius, images.dtype) * noise)

    def steepest_step(self, gradient):
        """Returns `U_p(gradient)` of Lemma 1: of unit length, or zero for a zero gradient."""
        if self.norm == "linf":
            return tf.sign(gradient)
        if self.norm == "l2":
            # A saturated loss leaves gradients around 1e-20: scaled by the largest entry first,
            # their squares do not underflow, and the step keeps its unit length.
            direction = tf.math.divide_no_nan(gradient, _per_example_norm(gradient, "linf"))
            return tf.math.divide_no_nan(direction, _per_example_norm(direction, "l2"))
        magnitude = tf.abs(gradient)
        axes = _example_axes(gradient)
        is_largest = magnitude >= tf.reduce_max(magnitude, axis=axes, keepdims=True)
        largest = tf.cast(is_largest, gradient.dtype) * tf.sign(gradient)
        return largest / tf.maximum(tf.reduce_sum(tf.abs(largest), axis=axes, keepdims=True), 1.0)

    def project(self, x_adv, images):
        """Maps `x_adv` into the ball around `images`, then into the box.

        linf and l1 are exact Euclidean projections onto ball and box together. l2 scales the
        perturbation down and then clips, as AutoAttack and cleverhans do: feasible, not nearest.
        """
        perturbation = x_adv - images
        if self.norm == "l1":
            low, high = self.bounds
            room = tf.where(perturbation > 0, high - images, images - low)
            perturbation = self._project_l1(perturbation, room)
        else:
            perturbation = self.project_perturbation(perturbation)
        return self.clip_to_bounds(images + perturbation)

    def project_perturbation(self, perturbation):
        """Maps a perturbation to the nearest point of the l_p ball, whatever the pixel bounds."""
        if self.norm == "linf":
            return tf.clip_by_value(perturbation, -self.epsilon, self.epsilon)
        if self.norm == "l2":
            length = _per_example_norm(perturbation, "l2")
            # The tensor comes first: it decides the dtype of the constant.
            return perturbation * tf.minimum(self.epsilon / tf.maximum(length, _NORM_FLOOR), 1.0)
        return self._project_l1(perturbation, tf.abs(perturbation))

    def clip_to_bounds(self, images):
        """Clips pixel values to the legal range."""
        return tf.clip_by_value(images, *self.bounds)

    def distance(self, x_adv, images):
        """Returns the l_p length of each example's perturbation, shape `(n,)`."""
        return tf.reshape(_per_example_norm(x_adv - images, self.norm), [-1])

    def _project_l1(self, perturbation, room):
        """Solves `sum_i clip(|d_i| - a, 0, room_i) = epsilon` for the shift `a >= 0` by bisection.

        The sum falls with `a`. Where it is at most epsilon from the start, `a` stays zero.
        """
        axes = _example_axes(perturbation)
        size = tf.abs(perturbation)

        def shrunk(shift):
            return tf.clip_by_value(size - shift, 0.0, room)

        def total(shift):
            return tf.reduce_sum(shrunk(shift), axis=axes, keepdims=True)

        lower = tf.zeros_like(tf.reduce_max(size, axis=axes, keepdims=True))
        upper = tf.reduce_max(size, axis=axes, keepdims=True)
        for _ in range(_BISECTION_STEPS):
            middle = 0.5 * (lower + upper)
            too_long = total(middle) > self.epsilon
            lower = tf.where(too_long, middle, lower)
            upper = tf.where(too_long, upper, middle)
        # `lower` is too small by rounding, which adds up over the coordinates: the last factor
        # puts the perturbation onto the sphere. A scheduled radius may be 0: no 0 / 0.
        excess = tf.maximum(total(lower) / (self.epsilon + _ZERO_RADIUS), 1.0)
        return tf.sign(perturbation) * shrunk(lower) / excess

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {"norm": self.norm, "epsilon": self.epsilon, "bounds": list(self.bounds)}

    @classmethod
    def from_config(cls, config: dict) -> "ThreatModel":
        """Builds a threat model from `get_config()`'s result."""
        return cls(**config)

    def __eq__(self, other) -> bool:
        return isinstance(other, ThreatModel) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((self.norm, self.epsilon, self.bounds))

    def __repr__(self) -> str:
        return f"ThreatModel(norm={self.norm!r}, epsilon={self.epsilon:.6g}, bounds={self.bounds})"


def with_radius(threat: ThreatModel, epsilon) -> ThreatModel:
    """Returns a copy with another radius, unchecked: a scalar tensor that may be zero.

    For use inside a training step only, where `epsilon` follows a schedule.
    """
    resized = copy.copy(threat)
    resized.epsilon = epsilon
    return resized


def draw_per_seed(sampler, images, seed):
    """Calls `sampler(shape, seed, dtype)` once, or once per example for `(n, 2)` seeds."""
    seed = tf.convert_to_tensor(seed)
    shape = tf.shape(images)
    if seed.shape.rank == 1:
        noise = sampler(shape, seed, images.dtype)
    else:
        one = tf.concat([[1], shape[1:]], axis=0)
        noise = tf.map_fn(
            lambda example_seed: sampler(one, example_seed, images.dtype)[0],
            seed,
            fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype),
        )
    return tf.ensure_shape(noise, images.shape)


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


def _example_axes(tensor) -> list[int]:
    return list(range(1, len(tensor.shape)))


def _per_example_norm(perturbation, norm: str):
    """Length of each example with kept dimensions, so that it broadcasts against images."""
    axes = _example_axes(perturbation)
    if norm == "linf":
        return tf.reduce_max(tf.abs(perturbation), axis=axes, keepdims=True)
    if norm == "l2":
        return tf.sqrt(tf.reduce_sum(tf.square(perturbation), axis=axes, keepdims=True))
    return tf.reduce_sum(tf.abs(perturbation), axis=axes, keepdims=True)


def _uniform_linf(shape, seed, dtype):
    return tf.random.stateless_uniform(shape, seed, -1.0, 1.0, dtype)


def _uniform_l2(shape, seed, dtype):
    direction = tf.random.stateless_normal(shape, seed, dtype=dtype)
    dimension = tf.cast(tf.reduce_prod(shape[1:]), dtype)
    one_per_example = tf.concat([shape[:1], tf.ones_like(shape[1:])], axis=0)
    length_seed = tf.random.fold_in(seed, 1)
    length = tf.random.stateless_uniform(one_per_example, length_seed, dtype=dtype)
    norm = tf.norm(tf.reshape(direction, [shape[0], -1]), axis=1)
    norm = tf.reshape(tf.maximum(norm, _NORM_FLOOR), one_per_example)
    return direction / norm * length ** (1.0 / dimension)


def _uniform_l1(shape, seed, dtype):
    tiny = np.finfo(dtype.as_numpy_dtype).tiny
    uniform = tf.random.stateless_uniform(shape, seed, tiny, 1.0, dtype)
    one_per_example = tf.concat([shape[:1], tf.ones_like(shape[1:])], axis=0)
    rest_seed = tf.random.fold_in(seed, 1)
    rest = -tf.math.log(tf.random.stateless_uniform(one_per_example, rest_seed, tiny, 1.0, dtype))
    sign_seed = tf.random.fold_in(seed, 2)
    signs = tf.sign(tf.random.stateless_uniform(shape, sign_seed, -1.0, 1.0, dtype))
    lengths = -tf.math.log(uniform)
    total = tf.reshape(tf.reduce_sum(tf.reshape(lengths, [shape[0], -1]), axis=1), one_per_example)
    return signs * lengths / (total + rest)


_BALL_SAMPLERS = {"linf": _uniform_linf, "l2": _uniform_l2, "l1": _uniform_l1}
