"""How linear the loss is around the images: gamma(epsilon, x), and how it grows with epsilon.

Paper: Qin et al. 2019, "Adversarial robustness through local linearization". Let `l` be the loss,
and G its gradient at the image. Then `gamma(epsilon, x) = max |l(x + d) - l(x) - <d, G>|` over the
threat model's ball. Any adversarial loss is at most `l(x) + |<d, G>| + gamma`. If gamma is large,
the gradient at the image says little about the ball, and weak attacks overestimate robustness.

The search is that of the LLR objective, with other settings. It follows the whole gradient of the
deviation, keeps the best iterate, and may start several times. What it finds is a lower bound.

In linf the search is Adam at three times the radius, which jumps between corners of the ball. On
100 images and one small CIFAR-10 network, Adam found a mean of 0.244 in 20 steps. Sign steps found
0.230 in 50. Sign steps along the loss alone, the direction of LLR's released search, found 0.162.
The other norms have no corners like these, and take steepest steps.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.analysis.analysis import Analysis, Subject, batches
from he_keras.analysis.registry import register
from he_keras.arguments import check_choice, check_number, check_positive_integer, check_seed
from he_keras.attacks import check_examples
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.victim import Victim
from he_keras.balls import seeds_from_content
from he_keras.drawing import legend_above, plain_axes, style
from he_keras.objectives.local_linearity import Search, Tangent, most_nonlinear_point
from he_keras.threat import ThreatModel, check_threat, with_radius

# How far the seeds of two restarts lie apart. The seeds of two runs usually differ by a small or a
# round number, and a prime keeps their restarts from meeting.
_RESTART_STRIDE = 7_919
#: Adam's rate in units of epsilon.
_ADAM_RATIO = 3.0
#: Length of a steepest step in units of epsilon / num_steps.
_STEP_RATIO = 2.5


class LocalLinearity(NamedTuple):
    """What `local_linearity` found, one row for each example.

    Attributes:
        gamma: largest deviation from the tangent plane that was found.
        slope: `|<d, G>|` at the same point.
        loss: the loss at the image.
        x_adv: the point.
    """

    gamma: np.ndarray
    slope: np.ndarray
    loss: np.ndarray
    x_adv: np.ndarray


def local_linearity(
    model,
    images,
    labels,
    threat: ThreatModel,
    num_steps: int = 20,
    num_restarts: int = 1,
    seed: int = 0,
    loss: str = "ce",
    batch_size: int = 250,
) -> LocalLinearity:
    """Measures gamma(epsilon, x) of each image, for any classifier with gradients.

    Cost for each example: num_restarts * (num_steps + 2) forward and num_restarts * num_steps
    backward passes, and one of each at the image.

    Args:
        model: a `keras.Model` or a callable from images to logits; it runs in inference mode.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        num_steps: steps of the search.
        num_restarts: searches from different uniform starts; the best counts. Every second one
            starts from the mirror image of the start before. A convex loss deviates most at one of
            two opposite ends, and each search climbs to the one on its own side.
        seed: seed of the starts, which do not depend on the batch size.
        loss: "ce", "cw" (the negative margin) or "dlr".
        batch_size: examples in a batch.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.analysis import local_linearity
        >>> squares = lambda x: tf.stack([x[:, 0] ** 2, 0.0 * x[:, 0]], axis=1)
        >>> x, y, threat = np.array([[0.5]], "float32"), np.array([1]), he.ThreatModel("linf", 0.1)
        >>> found = local_linearity(squares, x, y, threat, loss="cw")
        >>> round(float(found.gamma[0]), 4)
        0.01
    """
    check_threat(threat)
    images, labels = check_examples(threat, images, labels)
    measure = _Measure(model, threat, num_steps, num_restarts, seed, loss, batch_size)
    return measure(images, labels, threat.epsilon)


class _Measure:
    """The search, compiled once for all radii."""

    def __init__(self, model, threat, num_steps, num_restarts, seed, loss, batch_size) -> None:
        for name, value in (
            ("num_steps", num_steps),
            ("num_restarts", num_restarts),
            ("batch_size", batch_size),
        ):
            check_positive_integer(name, value)
        check_seed(seed)
        check_choice("loss", loss, tuple(losses.ATTACK_LOSSES))
        self.victim = Victim(model)
        self.threat = threat
        self.num_steps = num_steps
        self.num_restarts = num_restarts
        self.seed = seed
        self.loss = losses.ATTACK_LOSSES[loss]
        self.batch_size = batch_size
        self._compiled = tf.function(self._measure_batch, reduce_retracing=True, autograph=False)

    def __call__(self, images, labels, epsilon: float) -> LocalLinearity:
        found = [
            self._best_of_restarts(x, y, tf.constant(epsilon, x.dtype))
            for x, y, _ in batches(images, labels, self.batch_size)
        ]
        return LocalLinearity(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _best_of_restarts(self, images, labels, epsilon) -> LocalLinearity:
        best: list[np.ndarray] = []
        for restart in range(self.num_restarts):
            seeds = seeds_from_content(images, self.seed) + [restart // 2 * _RESTART_STRIDE, 0]
            side = tf.constant(1.0 if restart % 2 == 0 else -1.0, images.dtype)
            found = [part.numpy() for part in self._compiled(images, labels, seeds, side, epsilon)]
            better = found[0] > best[0] if best else np.ones(len(found[0]), bool)
            best = [
                np.where(better.reshape([-1] + [1] * (new.ndim - 1)), new, old)
                for new, old in zip(found, best or found, strict=True)
            ]
        return LocalLinearity(*best)

    def _measure_batch(self, images, labels, seeds, side, epsilon) -> LocalLinearity:
        threat = with_radius(self.threat, epsilon)
        start = images + side * (threat.random_start(images, seeds) - images)

        def loss(logits):
            return tf.cast(self.loss(logits, labels), images.dtype)

        tangent = Tangent(*loss_and_gradient(self.victim, loss, images)[1:])
        optimizer, step_size = self._step(epsilon)
        x_adv = most_nonlinear_point(
            Search(self.num_steps, optimizer, step_size, linear_term=True, keep="best"),
            self.victim.logits,
            loss,
            images,
            tangent,
            threat.clip_to_bounds(start),
            threat,
        )
        slope = tangent.slope(x_adv, images)
        gamma = tf.abs(loss(self.victim.logits(x_adv)) - tangent.loss - slope)
        return LocalLinearity(gamma, tf.abs(slope), tangent.loss, x_adv)

    def _step(self, epsilon) -> tuple:
        if self.threat.norm == "linf":
            return "adam", _ADAM_RATIO * epsilon
        return "sign", _STEP_RATIO * epsilon / self.num_steps


@register("linearity")
@dataclasses.dataclass(eq=False)
class Linearity(Analysis):
    """Deviation of the loss from its tangent plane against the radius of the ball (LLR paper).

    A point found within a smaller radius counts for the larger ones also.
    Cost for each example and radius: see `local_linearity`.

    Args:
        multiples: radii in units of each model's own epsilon.
        num_steps: steps of the search.
        num_restarts: searches from different starts, an even number of them in opposite pairs.
        loss: "ce", "cw" or "dlr". Only the last does not depend on the scale of the logits, which
            an HE head chooses.
        batch_size: examples in a batch.
        seed: seed of the starts.
    """

    multiples: tuple = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    num_steps: int = 20
    num_restarts: int = 2
    loss: str = "ce"
    batch_size: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        multiples = self.multiples
        for multiple in multiples:
            check_number("multiples", multiple, 0.0)
        if not multiples or list(multiples) != sorted(set(multiples)) or multiples[0] <= 0:
            raise ValueError(
                f"Invalid multiples; expected increasing numbers > 0; received {multiples}"
            )
        check_choice("loss", self.loss, tuple(losses.ATTACK_LOSSES))
        for name in ("num_steps", "num_restarts", "batch_size"):
            check_positive_integer(name, getattr(self, name))
        check_seed(self.seed)
        self.multiples = tuple(float(multiple) for multiple in multiples)

    def measure_one(self, subject: Subject) -> dict:
        """Returns the radii, and gamma and slope over the images at each."""
        settings = self.num_steps, self.num_restarts, self.seed, self.loss, self.batch_size
        measure = _Measure(subject.model, subject.threat, *settings)
        radii = [multiple * subject.threat.epsilon for multiple in self.multiples]
        found = [measure(subject.images, subject.labels, radius) for radius in radii]
        gamma = np.maximum.accumulate([each.gamma for each in found], axis=0)
        slope = np.array([each.slope for each in found])
        low, middle, high = np.quantile(gamma, [0.25, 0.5, 0.75], axis=1)
        return {
            "norm": subject.threat.norm,
            "epsilon": radii,
            "mean_gamma": gamma.mean(axis=1),
            "quartiles_of_gamma": [low, middle, high],
            "mean_slope": slope.mean(axis=1),
            "mean_loss": float(found[0].loss.mean()),
        }

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws mean gamma against the radius, one curve for each model, with its quartiles."""
        axes = figure.subplots()
        for number, (name, entry) in enumerate(numbers.items()):
            look = style(number)
            axes.plot(entry["epsilon"], entry["mean_gamma"], label=name, markersize=5, **look)
            low, _, high = entry["quartiles_of_gamma"]
            axes.fill_between(entry["epsilon"], low, high, color=look["color"], alpha=0.12)
        if all(min(entry["quartiles_of_gamma"][0]) > 0 for entry in numbers.values()):
            axes.set_yscale("log")
        norms = sorted({entry["norm"] for entry in numbers.values()})
        axes.set_xlabel(f"radius epsilon of the {' or '.join(norms)} ball (pixel values in [0, 1])")
        axes.set_ylabel(f"gamma: deviation of the {self.loss} loss\n(mean; band: quartiles)")
        plain_axes(axes)
        figure.suptitle("Deviation of the loss from its tangent plane", fontsize=10)
        legend_above(axes, 2)

    def table(self, numbers: Mapping) -> str:
        """Returns mean gamma and slope of each model at the radius nearest to its epsilon."""
        place = int(np.argmin([abs(multiple - 1.0) for multiple in self.multiples]))
        return "\n".join(
            f"{name}: gamma({entry['epsilon'][place]:.4f}) = {entry['mean_gamma'][place]:.4f}, "
            f"|<d, G>| = {entry['mean_slope'][place]:.4f} there, loss {entry['mean_loss']:.4f}"
            for name, entry in numbers.items()
        )
