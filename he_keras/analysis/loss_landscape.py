"""The loss around images, over the plane of the gradient's sign and a random sign vector.

Paper: the loss landscapes of the supplement to RAT, Fig. 3 (`x + a * sign(grad) + b * Rademacher`),
as first drawn by Tramer et al. 2018, "Ensemble adversarial training". If gradients tell the truth,
the loss rises evenly along the first axis and hardly changes along the second. Ridges and hollows
mean that gradients mislead.

Deviations: pixels are clipped to their bounds, so that every point is a legal image. For l2 and l1
both directions are scaled to length 1 in the threat model's norm. For linf they have that length
anyway.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.analysis.analysis import Analysis, Subject, batches
from he_keras.analysis.registry import register
from he_keras.arguments import (
    check_choice,
    check_number,
    check_positive_integer,
    check_seed,
    positive_number,
)
from he_keras.attacks import PGD, Attack, Victim, check_examples
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.balls import draw_per_seed
from he_keras.drawing import common_range, draw_contours, draw_relief, label_directions
from he_keras.threat import ThreatModel

#: Names of the losses, and what pictures call them.
LOSSES = {"ce": "cross-entropy", "cw": "margin loss"}
_AXES = "sign(gradient), in epsilons", "random signs, in epsilons"
_SHORT_AXES = "gradient", "random"
# A perturbation on the sphere itself may come out longer by rounding.
_ROUNDING = 1e-5


class LossSurface(NamedTuple):
    """Losses over a plane around each image; index `[image, along gradient, along random]`.

    Attributes:
        offsets: the multiples of the directions, in epsilons.
        losses: for "ce" and "cw", an array `(n, points, points)`.
        inside: mask of the points that lie in the threat model's ball, of the same shape.
    """

    offsets: np.ndarray
    losses: dict[str, np.ndarray]
    inside: np.ndarray


def loss_surface(
    model,
    images,
    labels,
    threat: ThreatModel,
    loss: str = "ce",
    num_points: int = 21,
    extent: float = 1.0,
    batch_size: int = 128,
    seed: int = 0,
) -> LossSurface:
    """Returns the cross-entropy and the margin loss over a plane around each image.

    The plane is `x + a * sign(gradient) + b * r`, with pixels clipped to their bounds. The random
    signs r are drawn from (seed, position of the image). The margin loss is the largest other logit
    minus the true one: it is positive if the prediction is wrong.

    Cost per image: one forward and backward pass, and `num_points ** 2` forward passes.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        loss: whose gradient gives the first direction, "ce" or "cw".
        num_points: points along each axis: an odd number, so that the image is among them.
        extent: the farthest multiple of each direction, in epsilons.
        batch_size: images in a pass.
        seed: seed of the random directions.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.analysis import loss_surface
        >>> linear = lambda images: images @ tf.constant([[1.0, 0.0], [0.0, 1.0]])
        >>> image, label = np.array([[0.7, 0.4]], "float32"), np.array([0])
        >>> surface = loss_surface(linear, image, label, he.ThreatModel("linf", 0.1), num_points=3)
        >>> surface.losses["cw"][0, :, 1].round(2).tolist()
        [-0.5, -0.3, -0.1]
    """
    images, labels = check_examples(threat, images, labels)
    _check_options(loss, num_points, batch_size, seed)
    offsets = np.linspace(-1.0, 1.0, num_points) * positive_number("extent", extent)
    plane = _Plane(Victim(model), threat, loss)
    parts = [plane.scores(offsets, *batch) for batch in batches(images, labels, batch_size, seed)]
    # From [part][quantity, along gradient, along random, image].
    scores = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
    inside = scores[2] <= threat.epsilon * (1 + _ROUNDING)
    return LossSurface(offsets, {"ce": scores[0], "cw": scores[1]}, inside)


def _check_options(loss, num_points, batch_size, seed) -> None:
    check_choice("loss", loss, tuple(LOSSES))
    check_positive_integer("num_points", num_points)
    if num_points < 3 or num_points % 2 == 0:
        raise ValueError(
            "Invalid num_points; expected an odd number >= 3, which has the image in the middle; "
            f"received num_points={num_points!r}"
        )
    check_positive_integer("batch_size", batch_size)
    check_seed(seed)


class _Plane:
    """The compiled passes."""

    def __init__(self, victim: Victim, threat: ThreatModel, loss: str) -> None:
        self.victim, self.threat, self.loss = victim, threat, losses.ATTACK_LOSSES[loss]
        self.directions = tf.function(self._directions, reduce_retracing=True)
        self.point = tf.function(self._point, reduce_retracing=True)

    def scores(self, offsets, images, labels, seeds) -> np.ndarray:
        """Returns both losses and the distance, `[quantity, along gradient, along random, n]`."""
        directions = self.directions(images, labels, seeds)
        steps = tf.constant(offsets * self.threat.epsilon, images.dtype)
        rows = [
            [self.point(images, labels, *directions, a, b).numpy() for b in steps] for a in steps
        ]
        return np.moveaxis(np.array(rows, np.float64), 2, 0)

    def _directions(self, images, labels, seeds):
        def loss(logits):
            return self.loss(logits, labels)

        gradient = loss_and_gradient(self.victim, loss, images)[2]
        signs = draw_per_seed(_random_signs, images, seeds)
        length = self.threat.distance(signs, tf.zeros_like(signs))
        return self.threat.steepest_step(gradient), signs / tf.reshape(
            length, [-1] + [1] * (images.shape.rank - 1)
        )

    def _point(self, images, labels, along_gradient, random, a, b):
        moved = self.threat.clip_to_bounds(images + a * along_gradient + b * random)
        logits = self.victim.logits(moved)
        distance = tf.cast(self.threat.distance(moved, images), logits.dtype)
        return tf.stack(
            [losses.cross_entropy(logits, labels), losses.cw_margin(logits, labels), distance]
        )


def _random_signs(shape, seed, dtype):
    bits = tf.random.stateless_uniform(shape, seed, 0, 2, tf.int32)
    return tf.cast(2 * bits - 1, dtype)


@register("loss-surface")
@dataclasses.dataclass(eq=False)
class LossSurfaces(Analysis):
    """Loss over the plane of the gradient's sign and random signs, RAT supplement, Fig. 3.

    The loss after one step of length epsilon along the gradient and the loss after PGD stand next
    to the planes. A plane holds only a small part of the ball, so its maximum is no worst case.

    Args:
        loss: "ce" or "cw": the loss that gives the first direction and that the attacks climb.
        num_points: points along each axis: an odd number, so that the image is among them.
        extent: the farthest multiple of each direction, in epsilons.
        num_pictured: how many single images are drawn in addition to the mean: the first ones.
        num_steps: steps of PGD.
        batch_size: images in a pass.
        seed: seed of the random directions and of PGD's starts.

    Example:
        >>> from he_keras import analysis
        >>> analysis.get("loss-surface", num_points=11).extent
        1.0
    """

    loss: str = "ce"
    num_points: int = 21
    extent: float = 1.0
    num_pictured: int = 2
    num_steps: int = 20
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        _check_options(self.loss, self.num_points, self.batch_size, self.seed)
        check_positive_integer("num_steps", self.num_steps)
        check_number("num_pictured", self.num_pictured, 0)
        self.extent = positive_number("extent", self.extent)

    def measure_one(self, subject: Subject) -> dict:
        """Returns planes and reference losses."""
        threat = subject.threat
        surface = loss_surface(
            *(subject.model, subject.images, subject.labels, threat, self.loss),
            num_points=self.num_points,
            extent=self.extent,
            batch_size=self.batch_size,
            seed=self.seed,
        )
        own, in_every_ball = surface.losses[self.loss], np.all(surface.inside, axis=0)
        settings = {"loss": self.loss, "batch_size": self.batch_size, "seed": self.seed}
        settings["stop_when_broken"] = False
        step = PGD(threat, 1, step_size=threat.epsilon, random_start=False, keep="last", **settings)
        attacked = self._losses_after(subject, PGD(threat, self.num_steps, **settings))
        pictured = range(min(self.num_pictured, len(own)))
        return {
            "norm": threat.norm,
            "offsets": surface.offsets,
            "mean": {name: values.mean(axis=0) for name, values in surface.losses.items()},
            "maximum": _maximum(own.mean(axis=0), in_every_ball, surface.offsets),
            "loss_at_image": self._losses(subject, subject.images).mean(),
            "loss_after_one_step": self._losses_after(subject, step).mean(),
            "loss_after_attack": attacked.mean(),
            "mean_of_maxima": np.where(surface.inside, own, -np.inf).max(axis=(1, 2)).mean(),
            "images": [
                {
                    "values": own[index],
                    "maximum": _maximum(own[index], surface.inside[index], surface.offsets),
                    "loss_after_attack": attacked[index],
                }
                for index in pictured
            ],
        }

    def _losses_after(self, subject: Subject, attack: Attack) -> np.ndarray:
        return self._losses(subject, attack(subject.model, subject.images, subject.labels).x_adv)

    def _losses(self, subject: Subject, images: np.ndarray) -> np.ndarray:
        victim, loss = Victim(subject.model), losses.ATTACK_LOSSES[self.loss]
        parts = [
            loss(victim.logits(x), y).numpy()
            for x, y, _ in batches(images, subject.labels, self.batch_size)
        ]
        return np.concatenate(parts).astype(np.float64)

    def table(self, numbers: Mapping) -> str:
        """Returns the mean losses that the points found by each way have."""
        lines = [f"mean {LOSSES[self.loss]}: at the image, after one step, on the plane, after PGD"]
        for name, entry in numbers.items():
            found = [entry["loss_at_image"], entry["loss_after_one_step"]]
            found += [entry["mean_of_maxima"], entry["loss_after_attack"]]
            lines.append(f"{name}: " + ", ".join(f"{value:.3f}" for value in found))
        return "\n".join(lines)

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws a row for each model: the mean as relief and as map, then single images."""
        panels = {name: self._panels(entry) for name, entry in numbers.items()}
        num_columns = min(len(each) for each in panels.values())
        figure.set_size_inches(2.6 * num_columns, 0.4 + 2.9 * len(panels))
        figure.suptitle(
            "Loss around test images, in the plane of gradient sign and random signs; "
            "cross: highest inside the ball (dashed)",
            fontsize=10,
        )
        for number in range(num_columns):
            heights = common_range([each[number][1] for each in panels.values()])
            for row, (name, entry) in enumerate(numbers.items()):
                title, values, maximum = panels[name][number]
                place = row * num_columns + number + 1
                flat = {} if number else {"projection": "3d"}
                axes = figure.add_subplot(len(panels), num_columns, place, **flat)
                axes.set_title(title if number else f"{name}\n{title}", fontsize=9)
                label_directions(axes, *(_AXES if number else _SHORT_AXES))
                if number:
                    draw_contours(axes, entry["offsets"], values, heights)
                    _mark(axes, entry["norm"], maximum)
                else:
                    draw_relief(axes, entry["offsets"], values, heights)

    def _panels(self, entry: Mapping) -> list[tuple]:
        """Title, values, and marked maximum of each picture in a model's row."""
        own, other = self.loss, next(name for name in LOSSES if name != self.loss)
        mean = entry["mean"]
        panels = [
            (f"mean {LOSSES[own]}", mean[own], None),
            (f"mean {LOSSES[own]}", mean[own], entry["maximum"]),
            (f"mean {LOSSES[other]}", mean[other], None),
        ]
        for number, image in enumerate(entry["images"], 1):
            panels.append((f"{LOSSES[own]}, image {number}", image["values"], image["maximum"]))
        return panels


def _maximum(values: np.ndarray, inside: np.ndarray, offsets: np.ndarray) -> dict:
    """The highest point of a plane among those inside the ball; the image itself is one."""
    first, second = np.unravel_index(np.where(inside, values, -np.inf).argmax(), values.shape)
    return {
        "loss": values[first, second],
        "along_gradient": offsets[first],
        "along_random": offsets[second],
    }


def _mark(axes, norm: str, maximum: Mapping | None) -> None:
    """Draws the edge of the ball, and a cross at the highest point inside it."""
    angle = np.linspace(0.0, 2 * np.pi, 181)
    edge = np.stack([np.cos(angle), np.sin(angle)])
    if norm != "l2":
        # Where the signs of both directions agree, their lengths add up.
        edge /= np.abs(edge).sum(axis=0)
    axes.plot(*edge, color="black", linestyle="--", linewidth=1.0)
    if maximum is not None:
        place = maximum["along_gradient"], maximum["along_random"]
        axes.plot(*place, marker="X", color="white", markeredgecolor="black", clip_on=False)
