"""FGSM, BIM, PGD, MIM, margin-PGD, adaptive PGD and the TRADES attack: settings of one loop."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_choice, check_number, check_positive_integer, positive_number
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import Best, Crafted, Goal, Score
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.balls import example_axes
from he_keras.threat import ThreatModel, check_threat, checked_start

LOSSES = ("kl", *losses.ATTACK_LOSSES)
#: Keeps a gradient of zeros finite when it is divided by its mean size.
_VELOCITY_FLOOR = 1e-12


class _State(NamedTuple):
    """Loop state; every entry has one row per example.

    Attributes:
        x_adv: the current iterate.
        velocity: the accumulated gradient of MIM.
        best: the best iterate and its score; without them for `keep="last"`.
        passes: forward and backward passes spent.
    """

    x_adv: Any
    velocity: Any
    best: Best
    passes: Any


@keras.saving.register_keras_serializable(package="he_keras")
class ProjectedGradient(Attack):
    """Iterated steepest ascent with projection.

    Each iteration evaluates a loss at the current point. It moves by `step_size` along the steepest
    direction of the norm (Lemma 1 of the HE paper), and projects back. The loop is one
    `tf.while_loop`: cost is linear in `num_steps`, graph size and compile time do not depend on it.

    Paper: see the settings: `FGSM`, `BIM`, `PGD`, `MIM`, `CWLinf`, `AdaptivePGD`, `TradesKL`.
    Assumes: a loss with a useful gradient in the images. The cross-entropy of a model with large
        logits underflows to a zero gradient.
    Cost: `num_steps` forward and backward passes (times `eot_samples`). `keep="best"` adds one
        forward pass that scores the last iterate, and `loss="kl"` one for the clean prediction.
    Deviations: from the papers' scripts. By default the strongest iterate is returned and broken
        examples are dropped. `keep="last", stop_when_broken=False` gives their protocol.

    Args:
        threat: the threat model.
        num_steps: number of steps K.
        step_size: length of a step; default 2.5 * epsilon / num_steps (Madry's rule). The HE paper
            evaluates with 0.003 at epsilon 0.031.
        random_start: True draws uniformly from the ball. False starts at the image. A number is the
            radius of a uniform start. "gaussian" adds 0.001 * N(0, I) without clipping, as the
            released training code of HE and TRADES does.
        loss: "ce", "cw" (margin), "dlr", or "kl" to the prediction on the clean image.
        decay: momentum of MIM; None for no momentum.
        margin: cosine margin inside the loss; "model" takes the head's (adaptive attack).
        eot_samples: passes over which the gradient of a randomised model is averaged.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.PGD(he.ThreatModel("linf", 0.1), num_steps=5, random_start=False)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.5, 0.5]], "float32")
        >>> result = attack(lambda images: images @ weights, images, np.array([0]))
        >>> [round(float(pixel), 3) for pixel in result.x_adv[0]]
        [0.4, 0.4]
    """

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 20,
        step_size: float | str | None = None,
        random_start: bool | float | str = True,
        loss: str = "ce",
        decay: float | None = None,
        margin: float | str = 0.0,
        eot_samples: int = 1,
        name: str = "pgd",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("eot_samples", eot_samples)
        self.eot_samples = int(eot_samples)
        self.random_start = checked_start(random_start)
        _check_choices(loss, self.random_start, decay, margin)
        self.num_steps = int(num_steps)
        self.step_size = 2.5 * threat.epsilon / num_steps
        if step_size is not None:
            self.step_size = positive_number("step_size", step_size)
        self.loss = loss
        self.decay = None if decay is None else float(decay)
        self.margin = margin if margin == "model" else float(margin)
        self.min_classes = losses.MIN_CLASSES[loss]
        self.has_targeted_form = loss in losses.TARGETED_LOSSES

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return 2 * self.eot_samples * self.num_steps + 1

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs the loop on one batch."""
        start = self.threat.start(self.random_start, images, seeds)
        return self.ascend(victim, images, labels, start, targets)

    def ascend(
        self, victim: Victim, images, labels, start, targets=None, threat=None, step_size=None
    ) -> Crafted:
        """Runs the loop from a given start, which may lie outside the ball and the bounds.

        Args:
            victim: the classifier.
            images: clean images.
            labels: integer labels.
            start: the first iterate.
            targets: classes to reach, see `Attack`; None for none.
            threat: another threat model than the attack's own, such as one whose radius follows a
                schedule of the training step.
            step_size: another step size than the attack's own; a scalar tensor serves too.
        """
        threat = self.threat if threat is None else threat
        step_size = self.step_size if step_size is None else step_size
        if self.keep == "best" or self.stop_when_broken:
            # The start is judged as an iterate too, so it must lie in the ball and the bounds.
            start = threat.project(start, images)
        reference = tf.stop_gradient(victim.logits(images)) if self.loss == "kl" else ()
        goal = Goal.of(labels, targets)
        state = self._initial_state(images, start)

        def step(_index, state, inputs):
            return self._step(victim, *inputs, state, threat, step_size)

        inputs = images, goal, reference
        if self.num_steps == 1:
            # Without a loop, a pass in training mode may also synchronise replicas (FastAT).
            state = step(0, state, inputs)
        else:
            is_active = (lambda state: ~state.best.broken) if self.stop_when_broken else None
            state = iterate(step, state, inputs, self.num_steps, is_active)
        forward_passes = state.passes + (1 if self.loss == "kl" else 0)
        if self.keep == "last":
            return Crafted(state.x_adv, forward_passes, state.passes)
        logits = victim.logits(state.x_adv)
        state = self._record(state, logits, self._loss(victim, logits, goal, reference), goal)
        x_adv, scored = state.best.point
        # One lucky draw of a randomised model does not count: there the framework scores again.
        score = scored if self.eot_samples == 1 else None
        return Crafted(x_adv, forward_passes + 1, state.passes, score=score)

    def _initial_state(self, images, start) -> _State:
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        unbroken = tf.zeros_like(passes, tf.bool)
        unscored = Score(unbroken, tf.zeros_like(passes, images.dtype), unbroken)
        return _State(
            x_adv=start,
            velocity=() if self.decay is None else tf.zeros_like(images),
            best=Best.before((start, unscored) if self.keep == "best" else (), images),
            passes=passes,
        )

    def _step(self, victim, images, goal, reference, state: _State, threat, step_size) -> _State:
        logits, loss, gradient = loss_and_gradient(
            victim,
            lambda logits: self._loss(victim, logits, goal, reference),
            state.x_adv,
            self.eot_samples,
        )
        state = self._record(state, logits, loss, goal)
        direction = gradient
        if self.decay is not None:
            direction = self.decay * state.velocity + _divided_by_mean_size(gradient)
            state = state._replace(velocity=direction)
        step = step_size * threat.steepest_step(direction)
        moved = threat.project(state.x_adv + step, images)
        if self.stop_when_broken:
            moved = select_rows(state.best.broken, state.x_adv, moved)
        return state._replace(x_adv=moved, passes=state.passes + self.eot_samples)

    def _loss(self, victim: Victim, logits, goal: Goal, reference):
        if self.loss == "kl":
            return losses.kl_divergence(reference, logits)
        margin = victim.head_margin() if isinstance(self.margin, str) else self.margin
        if margin:
            own = tf.one_hot(goal.classes, tf.shape(logits)[-1], dtype=logits.dtype)
            logits -= victim.scale * margin * own
        return goal.loss(self.loss, logits)

    def _record(self, state: _State, logits, loss, goal: Goal) -> _State:
        """Notes broken examples and, unless the last iterate is wanted, the best one."""
        if not self.stop_when_broken and self.keep == "last":
            return state
        scored = goal.score(logits, state.x_adv.dtype)
        point = (state.x_adv, scored) if self.keep == "best" else ()
        return state._replace(best=state.best.updated(point, loss, scored.broken))


@register("fgsm")
@keras.saving.register_keras_serializable(package="he_keras")
class FGSM(ProjectedGradient):
    """One step of length epsilon from the image itself.

    Paper: Goodfellow et al. 2015, "Explaining and harnessing adversarial examples".
    Assumes: a loss that rises along its gradient at the image, as far as epsilon.
    Cost: one forward and backward pass, and one forward pass to score the point.
    Deviations: as `ProjectedGradient`: where the step lowers the loss, the image is returned.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("fgsm", he.ThreatModel("linf", 0.1)).step_size
        0.1
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 1, **options) -> None:
        check_threat(threat)
        defaults = {"step_size": threat.epsilon, "random_start": False, "name": "fgsm"}
        super().__init__(threat, num_steps, **{**defaults, **options})


@register("bim", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class BIM(ProjectedGradient):
    """PGD that starts at the image itself.

    Paper: Kurakin et al. 2017, "Adversarial examples in the physical world".
    Assumes: a useful gradient of the cross-entropy, at the image itself too.
    Cost: `num_steps` forward and backward passes, and one forward pass to score the last iterate.
    Deviations: as `ProjectedGradient`. The step follows from epsilon and `num_steps`. The paper
        fixes it at one grey level and derives the number of steps.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("bim-10", he.ThreatModel()).random_start
        False
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 10, **options) -> None:
        super().__init__(threat, num_steps, **{"random_start": False, "name": "bim", **options})


@register("pgd", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class PGD(ProjectedGradient):
    """Projected gradient ascent on the cross-entropy from a uniform random start.

    Paper: Madry et al. 2018, "Towards deep learning models resistant to adversarial attacks".
    Assumes: a useful gradient of the cross-entropy, see `ProjectedGradient`.
    Cost: `num_steps` forward and backward passes, and one forward pass to score the last iterate.
    Deviations: those of `ProjectedGradient`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("pgd-20", he.ThreatModel()).num_steps
        20
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        super().__init__(threat, num_steps, **options)


@register("mim", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class MIM(ProjectedGradient):
    """Momentum iterative method, decay 1, from the image itself.

    Paper: Dong et al. 2018, "Boosting adversarial attacks with momentum".
    Assumes: a useful gradient of the cross-entropy, at the image itself too.
    Cost: `num_steps` forward and backward passes, and one forward pass to score the last iterate.
    Deviations: as `ProjectedGradient`. The gradient is divided by its mean absolute value, floored
        at 1e-12. That is a constant factor away from the paper's l1 norm, so the signs are the
        same.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("mim-20", he.ThreatModel()).decay
        1.0
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        defaults = {"random_start": False, "decay": 1.0, "name": "mim"}
        super().__init__(threat, num_steps, **{**defaults, **options})


@register("cw-linf", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class CWLinf(ProjectedGradient):
    """PGD on the C&W margin: does not depend on the scale of the logits.

    Paper: Carlini & Wagner 2017, "Towards evaluating the robustness of neural networks".
    Assumes: logits with a useful gradient in the images, whatever their scale.
    Cost: `num_steps` forward and backward passes, and one forward pass to score the last iterate.
    Deviations: as `ProjectedGradient`; of the paper only the loss, not clamped: its own linf attack
        minimises a penalty.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("cw-linf-20", he.ThreatModel()).loss
        'cw'
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        super().__init__(threat, num_steps, **{"loss": "cw", "name": "cw-linf", **options})


@register("adaptive-pgd", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class AdaptivePGD(ProjectedGradient):
    """PGD on the training loss of an HE head: scale and margin inside the cross-entropy.

    Paper: Pang et al. 2020, the HE paper, Sec. 4.4.
    Assumes: a `CosineHead` (without one: PGD) and a useful gradient of the scaled cross-entropy.
    Cost: `num_steps` forward and backward passes, and one forward pass to score the last iterate.
    Deviations: those of `ProjectedGradient`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("adaptive-pgd-20", he.ThreatModel()).margin
        'model'
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 20, **options) -> None:
        defaults = {"margin": "model", "name": "adaptive-pgd"}
        super().__init__(threat, num_steps, **{**defaults, **options})


@register("trades-kl", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class TradesKL(ProjectedGradient):
    """The released TRADES adversary: divergence from the clean prediction, from a Gaussian start.

    Paper: Zhang et al. 2019, "Theoretically principled trade-off between robustness and accuracy".
    Assumes: predictions with a useful gradient in the images; labels only decide what is broken.
    Cost: `num_steps` forward and backward passes, and 2 forward passes: clean and last iterate.
    Deviations: as `ProjectedGradient`. The start is clipped to the bounds, which the released code
        does after the first step. l2 takes normalised steps, where that code runs SGD. The default
        step is 7/31 of epsilon: 0.007 at the released epsilon of 0.031.

    Example:
        >>> import he_keras as he
        >>> round(he.attacks.get("trades-kl-10", he.ThreatModel("linf", 0.031)).step_size, 6)
        0.007
    """

    def __init__(self, threat: ThreatModel, num_steps: int = 10, **options) -> None:
        check_threat(threat)
        defaults = {"loss": "kl", "random_start": "gaussian", "name": "trades-kl"}
        step_size = threat.epsilon * 7 / 31
        super().__init__(threat, num_steps, **{"step_size": step_size, **defaults, **options})


def _check_choices(loss, random_start, decay, margin) -> None:
    check_choice("loss", loss, LOSSES)
    if decay is not None:
        check_number("decay", decay, 0.0)
    if loss == "kl" and random_start is False:
        raise ValueError(
            "The KL divergence has zero gradient at the image itself; expected a random start; "
            "received random_start=False"
        )
    if margin != "model":
        check_number("margin", margin)


def _divided_by_mean_size(gradient):
    mean_size = tf.reduce_mean(tf.abs(gradient), axis=example_axes(gradient), keepdims=True)
    return gradient / tf.maximum(mean_size, _VELOCITY_FLOOR)
