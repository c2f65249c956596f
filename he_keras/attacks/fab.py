"""FAB and FAB-T: the nearest adversarial image, by projections onto linearised boundaries."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_number, check_positive_integer, check_share
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.boundary import Boundary, nearest_boundary
from he_keras.attacks.framework.result import Best, Crafted, Goal, other_classes
from he_keras.attacks.framework.rows import iterate, mask_like, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import start_noise, step_to_hyperplane
from he_keras.threat import ThreatModel

#: Shortest way that counts: it keeps the share of two ways of length zero finite.
_LENGTH_FLOOR = 1e-8
#: Length of a random start, relative to epsilon.
_START_LENGTH = 0.5


class _State(NamedTuple):
    """Loop state; every entry has one row per example."""

    point: Any
    best: Best
    forward_passes: Any
    backward_passes: Any


@register("fab", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class FAB(Attack):
    """Fast adaptive boundary attack: looks for the nearest adversarial image, whatever epsilon.

    Each iteration linearises the decision boundary at the current point. It projects that point and
    the clean image onto it, within the pixel bounds. It then goes a little beyond a mixture of the
    two projections. Where that is misclassified, it steps back towards the clean image. FAB takes
    the nearest boundary of all classes. With `num_targets` (FAB-T) it takes that of one target
    class after another. One run gives robust accuracy at every radius.

    Paper: Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive
        boundary attack".
    Assumes: logits that are differentiable in the image; their scale does not matter. Strong where
        cross-entropy attacks meet vanishing gradients. Useless against gradients that are masked.
    Cost: 2 forward and C - 1 backward passes per iteration for C classes. With `num_targets`: 2
        forward passes and 1 backward pass per iteration and target, plus one forward pass that
        ranks the targets.
    Deviations: from the authors' code. `balls.step_to_hyperplane` computes the projections
        differently, so rounding differs. FAB compares C - 1 boundaries one after the other instead
        of storing the gradients of all classes. Restarts repeat all targets in turn, not each
        target. The scale of tiny gradients is kept.

    Args:
        threat: the threat model; epsilon decides what counts as success, and the length of random
            starts.
        num_steps: iterations, for each target and restart.
        num_restarts: the first run starts at the image, later ones at a random point nearby.
        alpha_max: largest weight of the clean image's projection in the mixture.
        eta: how far to go, relative to the way onto the boundary.
        beta: what is kept of the perturbation of a misclassified point.
        num_targets: attack so many classes of largest clean logit one after the other. None goes to
            the nearest boundary of all classes.
        stop_when_broken: True ends an example at the first adversarial image within epsilon. False
            searches on for the nearest one.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.attacks.fab import FAB
        >>> attack = FAB(he.ThreatModel("linf", 0.1), num_steps=20)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.1, 0.2]], "float32")
        >>> result = attack(lambda images: images @ weights - [0.1, -0.1], images, np.array([0]))
        >>> print(round(float(result.distance[0]), 3))
        0.067
    """

    minimum_norm = True
    has_targeted_form = True

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 100,
        num_restarts: int = 1,
        alpha_max: float = 0.1,
        eta: float = 1.05,
        beta: float = 0.9,
        num_targets: int | None = None,
        stop_when_broken: bool = False,
        name: str = "fab",
        **kwargs,
    ) -> None:
        super().__init__(
            threat,
            num_restarts=num_restarts,
            stop_when_broken=stop_when_broken,
            name=name,
            **kwargs,
        )
        check_positive_integer("num_steps", num_steps)
        check_number("eta", eta, 1.0)
        for setting, value in (("alpha_max", alpha_max), ("beta", beta)):
            check_share(setting, value)
        if num_targets is not None:
            check_positive_integer("num_targets", num_targets)
        self.num_steps = int(num_steps)
        self.alpha_max = float(alpha_max)
        self.eta = float(eta)
        self.beta = float(beta)
        self.num_targets = None if num_targets is None else int(num_targets)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        # Each step takes two forward passes, and a gradient of each boundary that it compares.
        if self.num_targets is None:
            return (1 + num_classes) * self.num_steps + 1
        return min(self.num_targets, num_classes - 1) * (3 * self.num_steps + 1)

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Searches from one start, or from one start for each class that it goes to."""
        goal, state = Goal.of(labels, targets), _nothing_found(images)
        if self.num_targets is None or goal.is_targeted:
            state = state._replace(point=self._start(images, seeds, 0))
            return _crafted(self._search(victim, (images, goal), state))
        classes = other_classes(victim.logits(images), labels, self.num_targets)

        def search_class(column, state, _inputs):
            candidate = tf.gather(classes, column, axis=1)[:, tf.newaxis]
            state = state._replace(point=self._start(images, seeds, column))
            return self._search(victim, (images, goal, candidate), state)

        state = iterate(search_class, state, (), tf.shape(classes)[1])
        state = state._replace(forward_passes=state.forward_passes + 1)
        return _crafted(state)

    def search(self, victim: Victim, images, labels, start, candidates=None) -> Crafted:
        """Runs the loop from a given start inside the bounds.

        Args:
            victim: the classifier.
            images: clean images.
            labels: int tensor `(n,)`.
            start: where to start, of the images' shape.
            candidates: int tensor `(n,)`, the class to go to; None for the nearest boundary.
        """
        inputs = [images, Goal(labels)]
        if candidates is not None:
            inputs.append(candidates[:, tf.newaxis])
        state = _nothing_found(images)._replace(point=start)
        return _crafted(self._search(victim, inputs, state))

    def _search(self, victim: Victim, inputs, state: _State) -> _State:
        def step(_index, state, inputs):
            return self._step(victim, state, *inputs)

        is_active = None
        if self.stop_when_broken:
            is_active = lambda state: state.best.distance > self.threat.epsilon  # noqa: E731
        return iterate(step, state, inputs, self.num_steps, is_active)

    def _step(self, victim, state: _State, images, goal: Goal, candidates=None) -> _State:
        boundary, backward_passes = nearest_boundary(
            victim, state.point, goal, self.threat.norm, candidates
        )
        point = self._beyond(boundary, state.point, images)
        wrong = goal.is_reached(victim.logits(point))
        distance = self.threat.distance(point, images)
        back = images + self.beta * (point - images)
        return _State(
            point=select_rows(wrong, back, point),
            best=state.best.updated(point, -distance, wrong, only_broken=True),
            forward_passes=state.forward_passes + 2,
            backward_passes=state.backward_passes + backward_passes,
        )

    def _beyond(self, boundary: Boundary, point, images):
        """A point beyond the boundary, between the current point's way and the clean image's."""
        axes = list(range(1, images.shape.rank))
        change = tf.reduce_sum(boundary.gradient * (images - point), axis=axes)
        step, image_step = (
            step_to_hyperplane(origin, boundary.gradient, gap, self.threat.norm, self.threat.bounds)
            for origin, gap in ((point, boundary.gap), (images, boundary.gap + change))
        )
        length, image_length = (
            tf.maximum(self.threat.distance(way, 0.0), _LENGTH_FLOOR) for way in (step, image_step)
        )
        alpha = tf.minimum(length / (length + image_length), self.alpha_max)
        alpha = mask_like(alpha, images)
        mixture = (1.0 - alpha) * (point + self.eta * step)
        return self.threat.clip_to_bounds(mixture + alpha * (images + self.eta * image_step))

    def _start(self, images, seeds, number):
        """The image itself in the first run, a point at half of epsilon in later restarts."""
        if self.num_restarts == 1:
            return images
        noise = start_noise(images, seeds, self.threat.norm, number)
        length = mask_like(tf.maximum(self.threat.distance(noise, 0.0), _LENGTH_FLOOR), images)
        noise = noise * (_START_LENGTH * self.threat.epsilon / length)
        is_later = tf.broadcast_to(~self._is_first_run(seeds), tf.shape(images)[:1])
        return select_rows(is_later, self.threat.clip_to_bounds(images + noise), images)

    def _is_first_run(self, seeds):
        """True where a seed belongs to the first restart."""
        first = self._seeds(np.zeros(1, np.int64), 0)[0, 0]
        return seeds[..., 0] == first


@register("fab-t", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class FABT(FAB):
    """FAB against one target class after another: cheaper than FAB where there are many classes.

    Paper: Croce & Hein 2020, see `FAB`.
    Assumes: logits that are differentiable in the image, whatever their scale.
    Cost: 2 forward passes and 1 backward pass per iteration and target (9 targets, or all wrong
        classes if fewer), plus one forward pass that ranks the targets.
    Deviations: those of `FAB`: among them, restarts repeat all targets in turn.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("fab-t-50", he.ThreatModel()).num_targets
        9
    """

    def __init__(self, threat: ThreatModel, num_targets: int | None = 9, **options) -> None:
        super().__init__(threat, **{"num_targets": num_targets, "name": "fab-t", **options})


def _nothing_found(images) -> _State:
    passes = tf.zeros(tf.shape(images)[:1], tf.int32)
    return _State(
        point=images,
        best=Best.before(images, images),
        forward_passes=passes,
        backward_passes=passes,
    )


def _crafted(state: _State) -> Crafted:
    passes = state.forward_passes, state.backward_passes
    return Crafted(state.best.point, *passes, state.best.distance)
