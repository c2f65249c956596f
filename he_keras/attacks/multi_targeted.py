"""Multi-targeted attack: one run towards every other class, each ascending `o_t - o_y`."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import (
    check_choice,
    check_number,
    check_positive_integer,
    parse_epsilon,
)
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import adam_step, loss_and_gradient, zero_moments
from he_keras.attacks.framework.result import Best, Crafted, is_wrong, other_classes
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import seeds_of_target
from he_keras.threat import ThreatModel, checked_start

OPTIMIZERS = ("adam", "sign")


class Runs(NamedTuple):
    """The runs so far, towards one target after the other; every entry has one row per example.

    Attributes:
        best: the best iterate of them all; the smaller its margin, the stronger it is.
        forward_passes: passes spent.
        backward_passes: gradient passes spent.
    """

    best: Best
    forward_passes: Any
    backward_passes: Any

    @classmethod
    def nothing(cls, images) -> "Runs":
        """Returns the record before the first run, in which the images themselves stand."""
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        return cls(Best.before(images, images), passes, passes)

    def judged(self, x_adv, logits, labels, only_broken: bool = False) -> "Runs":
        """Returns the record after these iterates, or only after those that are misclassified."""
        broken, strength = is_wrong(logits, labels), -losses.margin(logits, labels)
        return self._replace(best=self.best.updated(x_adv, strength, broken, only_broken))


class _TargetRun(NamedTuple):
    """State of the run towards one target; `moments` is empty without Adam."""

    x_adv: Any
    moments: Any
    found: Runs


@keras.saving.register_keras_serializable(package="he_keras")
@register("multi-targeted", budget="num_steps")
class MultiTargeted(Attack):
    """Projected ascent on `o_t - o_y` for every target class t in turn.

    Each run starts at its own random point and projects after each step of Adam (or of steepest
    ascent). An example is broken if any run breaks it. Otherwise the iterate of the smallest margin
    over all runs is returned.

    Paper: Gowal et al. 2019, "An alternative surrogate loss for PGD-based adversarial testing",
        used with Adam to evaluate local linearity regularisation (Qin et al. 2019).
    Assumes: logits with a useful gradient in the images. A difference of two logits never
        saturates, and its gradient does not depend on the scale of the logits but for a factor.
    Cost: one forward pass to rank the classes, then for each target `num_steps` forward and
        backward passes and one forward pass that scores the last iterate.
    Deviations: from the released code. Classes are tried in the order of their clean logits, so
        that most examples break early. An iterate on the way counts, not just the last one, unless
        `keep="last", stop_when_broken=False`. A run towards t succeeds in whatever class it ends.
        Adam's floor is 1e-8, not 1e-9.

    Args:
        threat: the threat model.
        num_steps: steps towards each target.
        num_targets: how many classes to try, those with the largest clean logits. None tries all
            but the true class, as for models with fewer classes.
        optimizer: "adam", or "sign" for steepest-ascent steps (signs in l_inf).
        learning_rate: of Adam, as a share of the width of the pixel bounds.
        step_size: length of a "sign" step; default 2.5 * epsilon / num_steps.
        random_start: see `ProjectedGradient`; each target draws its own start.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.MultiTargeted(he.ThreatModel("linf", 0.1), 5, random_start=False)
        >>> weights = tf.constant([[1.0, -1.0, 0.9], [0.0, 0.0, 0.3]])
        >>> images = np.array([[0.6, 0.1]], "float32")
        >>> result = attack(lambda images: images @ weights, images, np.array([0]))
        >>> bool(result.success[0]), [round(float(pixel), 2) for pixel in result.x_adv[0]]
        (True, [0.5, 0.2])
    """

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 20,
        num_targets: int | None = None,
        optimizer: str = "adam",
        learning_rate: float = 0.1,
        step_size: float | str | None = None,
        random_start: bool | float | str = True,
        name: str = "multi-targeted",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        if num_targets is not None:
            check_positive_integer("num_targets", num_targets)
        check_number("learning_rate", learning_rate)
        _check_optimizer(optimizer, learning_rate, step_size)
        self.num_steps = int(num_steps)
        self.num_targets = None if num_targets is None else int(num_targets)
        self.optimizer = optimizer
        self.learning_rate = float(learning_rate)
        self.random_start = checked_start(random_start)
        if optimizer == "sign":
            # With Adam there is none: an evaluation gives its step size to attacks that have one.
            length = 2.5 * threat.epsilon / num_steps
            self.step_size = length if step_size is None else parse_epsilon(step_size)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        num_targets = min(self.num_targets or num_classes - 1, num_classes - 1)
        return num_targets * (2 * self.num_steps + 1)

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs towards one target after the other, on the examples that are still unbroken."""
        targets = other_classes(victim.logits(images), labels, self.num_targets)
        found = Runs.nothing(images)
        found = found._replace(forward_passes=found.forward_passes + 1)
        # A seed for the whole batch has no row to select.
        per_example = seeds.shape.rank == 2
        inputs = (images, labels, targets, *([seeds] if per_example else []))

        def step(index, found, inputs):
            images, labels, targets, *own = inputs
            run_seeds = seeds_of_target(own[0] if own else seeds, index)
            start = self.threat.start(self.random_start, images, run_seeds)
            target = tf.gather(targets, index, axis=1)
            return self.approach(victim, images, labels, target, start, found)

        is_active = (lambda found: ~found.best.broken) if self.stop_when_broken else None
        found = iterate(step, found, inputs, tf.shape(targets)[1], is_active)
        return Crafted(found.best.point, found.forward_passes, found.backward_passes)

    def approach(self, victim: Victim, images, labels, target, start, found: Runs) -> Runs:
        """Runs from `start` towards one target and returns the better of `found` and this run."""
        moments = zero_moments(images) if self.optimizer == "adam" else ()
        # Every point that is judged must lie in the ball and the bounds, the start too.
        run = _TargetRun(self.threat.project(start, images), moments, found)

        def step(index, run, inputs):
            return self._step(victim, index, run, *inputs)

        is_active = (lambda run: ~run.found.best.broken) if self.stop_when_broken else None
        run = iterate(step, run, (images, labels, target), self.num_steps, is_active)
        found = run.found._replace(forward_passes=run.found.forward_passes + 1)
        return found.judged(run.x_adv, victim.logits(run.x_adv), labels)

    def _step(self, victim, index, run: _TargetRun, images, labels, target) -> _TargetRun:
        def difference(logits):
            return losses.true_logit(logits, target) - losses.true_logit(logits, labels)

        logits, _, gradient = loss_and_gradient(victim, difference, run.x_adv)
        found = run.found._replace(
            forward_passes=run.found.forward_passes + 1,
            backward_passes=run.found.backward_passes + 1,
        )
        if self.keep == "best" or self.stop_when_broken:
            found = found.judged(run.x_adv, logits, labels, only_broken=self.keep == "last")
        moments = run.moments
        if moments:
            rate = self.learning_rate * self.threat.width
            step, moments = adam_step(gradient, moments, index + 1, rate)
        else:
            step = self.step_size * self.threat.steepest_step(gradient)
        moved = self.threat.project(run.x_adv + step, images)
        if self.stop_when_broken:
            moved = select_rows(found.best.broken, run.x_adv, moved)
        return _TargetRun(moved, moments, found)


def _check_optimizer(optimizer, learning_rate, step_size) -> None:
    check_choice("optimizer", optimizer, OPTIMIZERS)
    if learning_rate <= 0:
        raise ValueError(
            f"Invalid learning_rate; expected > 0; received learning_rate={learning_rate!r}"
        )
    if step_size is None:
        return
    if optimizer == "adam":
        raise ValueError(
            'Adam has no step size; expected learning_rate, or optimizer="sign"; '
            f"received step_size={step_size!r}"
        )
    if parse_epsilon(step_size) <= 0:
        raise ValueError(f"Invalid step_size; expected > 0; received step_size={step_size!r}")
