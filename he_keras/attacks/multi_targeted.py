"""Multi-targeted attack: one run towards every other class, each ascending `o_t - o_y`."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.adam import adam_step, zero_moments
from he_keras.attacks.attack import Attack, is_wrong
from he_keras.attacks.checks import check_number, check_positive_integer
from he_keras.attacks.gradients import loss_and_gradient
from he_keras.attacks.registry import register
from he_keras.attacks.result import Crafted
from he_keras.attacks.starts import checked_start, draw_start
from he_keras.attacks.survivors import iterate, select_rows
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel, parse_epsilon

OPTIMIZERS = ("adam", "sign")
# Spreads the seeds of different targets; a prime, so that restarts and targets do not meet.
_SEED_STRIDE = 1_000_003


class Found(NamedTuple):
    """What is kept from target to target; every entry has one row per example."""

    x_adv: Any
    margin: Any
    broken: Any
    forward_passes: Any
    backward_passes: Any


class _Run(NamedTuple):
    """State of the run towards one target; `moments` is empty without Adam."""

    x_adv: Any
    moments: Any
    found: Found


@keras.saving.register_keras_serializable(package="he_keras")
@register("multi-targeted", budget="num_steps")
class MultiTargeted(Attack):
    """Projected ascent on `o_t - o_y` for every target class t in turn.

    Each run starts at its own random point and projects after each step of Adam (or of steepest
    ascent). An example is broken if any run breaks it; else the iterate of the smallest margin over
    all runs is returned.

    Paper: Gowal et al. 2019, "An alternative surrogate loss for PGD-based adversarial testing",
        used with Adam to evaluate local linearity regularisation (Qin et al. 2019).
    Assumes: logits with a useful gradient in the images. A difference of two logits never
        saturates, and its gradient does not depend on the scale of the logits but for a factor.
    Cost: one forward pass to rank the classes, then for each target `num_steps` forward and
        backward passes and one forward pass that scores the last iterate.
    Deviations: from the released code: classes are tried in the order of their clean logits, so
        that most examples break early; an iterate on the way counts, not just the last one, unless
        `keep="last", stop_when_broken=False`; a run towards t succeeds in whatever class it ends.

    Args:
        threat: the threat model.
        num_steps: steps towards each target.
        num_targets: how many classes to try, those with the largest clean logits; None for all but
            the true class, as for models with fewer classes.
        optimizer: "adam", or "sign" for steepest-ascent steps (signs in l_inf).
        learning_rate: of Adam, in units of pixel values.
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

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs towards one target after the other, on the examples that are still unbroken."""
        targets = self._ranked_targets(victim.logits(images), labels)
        found = nothing_found(images)
        found = found._replace(forward_passes=found.forward_passes + 1)
        # A seed for the whole batch has no row to select.
        per_example = seeds.shape.rank == 2
        inputs = (images, labels, targets, *([seeds] if per_example else []))

        def step(index, found, inputs):
            images, labels, targets, *own = inputs
            run_seeds = seeds_of_target(own[0] if own else seeds, index)
            start = draw_start(self.threat, self.random_start, images, run_seeds)
            target = tf.gather(targets, index, axis=1)
            return self.approach(victim, images, labels, target, start, found)

        is_active = (lambda found: ~found.broken) if self.stop_when_broken else None
        found = iterate(step, found, inputs, tf.shape(targets)[1], is_active)
        return Crafted(found.x_adv, found.forward_passes, found.backward_passes)

    def _ranked_targets(self, logits, labels):
        """The classes to try, best first, `(n, targets)`: never the label."""
        num_classes = tf.shape(logits)[1]
        is_true = tf.one_hot(labels, num_classes, True, False, dtype=tf.bool)
        others = tf.where(is_true, tf.cast(-float("inf"), logits.dtype), logits)
        count = num_classes - 1
        if self.num_targets is not None:
            count = tf.minimum(count, self.num_targets)
        return tf.math.top_k(others, k=count).indices

    def approach(self, victim: Victim, images, labels, target, start, found: Found) -> Found:
        """Runs from `start` towards one target and returns the better of `found` and this run."""
        moments = zero_moments(images) if self.optimizer == "adam" else ()
        # What is judged as an iterate must be allowed, the start included.
        run = _Run(self.threat.project(start, images), moments, found)

        def step(index, run, inputs):
            return self._step(victim, index, run, *inputs)

        is_active = (lambda run: ~run.found.broken) if self.stop_when_broken else None
        run = iterate(step, run, (images, labels, target), self.num_steps, is_active)
        found = run.found._replace(forward_passes=run.found.forward_passes + 1)
        return better(found, run.x_adv, victim.logits(run.x_adv), labels)

    def _step(self, victim, index, run: _Run, images, labels, target) -> _Run:
        def difference(logits):
            return losses.true_logit(logits, target) - losses.true_logit(logits, labels)

        logits, _, gradient = loss_and_gradient(victim, difference, run.x_adv)
        found = run.found._replace(
            forward_passes=run.found.forward_passes + 1,
            backward_passes=run.found.backward_passes + 1,
        )
        if self.keep == "best" or self.stop_when_broken:
            only_broken = self.keep == "last"
            found = better(found, run.x_adv, logits, labels, only_broken)
        moments = run.moments
        if moments:
            step, moments = adam_step(gradient, moments, index + 1, self.learning_rate)
        else:
            step = self.step_size * self.threat.steepest_step(gradient)
        moved = self.threat.project(run.x_adv + step, images)
        if self.stop_when_broken:
            moved = select_rows(found.broken, run.x_adv, moved)
        return _Run(moved, moments, found)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_steps": self.num_steps,
            "num_targets": self.num_targets,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "step_size": getattr(self, "step_size", None),
            "random_start": self.random_start,
        }


def _check_optimizer(optimizer, learning_rate, step_size) -> None:
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"Unknown optimizer; expected one of {OPTIMIZERS}; received optimizer={optimizer!r}"
        )
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


def seeds_of_target(seeds, index):
    """Returns other seeds of the same shape for the target of this index."""
    return seeds * [_SEED_STRIDE, 1] + tf.stack([index + 1, 0])


def nothing_found(images) -> Found:
    """The record before the first run: the images themselves, with any other one better."""
    rows = tf.shape(images)[:1]
    passes = tf.zeros(rows, tf.int32)
    return Found(images, tf.fill(rows, images.dtype.max), tf.zeros(rows, tf.bool), passes, passes)


def better(found: Found, x_adv, logits, labels, only_broken: bool = False) -> Found:
    """Takes over iterates that break an example, or else (by default) lower its margin."""
    # Where the batch size is known for one argument only, the shape of a comparison is lost.
    wrong = tf.ensure_shape(is_wrong(logits, labels), [None])
    margin = tf.cast(losses.margin(logits, labels), found.margin.dtype)
    nearer = (wrong == found.broken) & (margin < found.margin)
    better = wrong & ~found.broken
    if not only_broken:
        better |= nearer
    new = found._replace(x_adv=x_adv, margin=margin)
    return select_rows(better, new, found)._replace(broken=found.broken | wrong)
