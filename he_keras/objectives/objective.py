"""The contract of a training objective: what to craft, and which loss to minimise.

A training step of `HEAdversarialModel` goes one way. It calls `craft` for the images to train on
and `forward` for their losses. Then it takes one gradient, and lets the optimizer move the weights.
Then it tells the objective (`after_update`, `observe`), which may keep state of its own. An
objective file writes `craft` and `forward`. Both are plain functions of their arguments, so that a
stored adversarial batch can be fed in, and a model need not be compiled. The model takes care of
gradients, weights, replicas and metrics. Crafting runs the network in inference mode unless an
objective says otherwise.

The margin of an HE head enters the training loss (`Objective.cross_entropy`). The adversaries see
the scaled logits without it, as in the released code of the HE paper. There are two exceptions.
FreeAT's perturbation follows the gradient of the training loss itself. LLR searches for the points
where the loss that it trains is least linear.

Radius and step size may follow schedules of the training step (PAS: Liu et al. 2020, "On the loss
landscape of adversarial training"). `craft` takes the number of the training step as an argument,
and `Objective.sizes_at` returns both sizes for it.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from he_keras import losses
from he_keras.arguments import check_number
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.projected_gradient import ProjectedGradient
from he_keras.configurable import Configurable, Sealed
from he_keras.threat import ThreatModel, with_radius

# PAS's own: keeps the share of a radius finite.
_SMALL_RADIUS = 1e-6


class TrainingPass(NamedTuple):
    """Per-example losses, and the logits that they were computed from.

    Attributes:
        losses: shape `(n,)`, to be minimised on average.
        logits: logits of the examples trained on (adversarial where there are any).
        clean_logits: logits of the clean images, where the objective computes them.
        observed: what `observe` is told after the update of the weights; None for nothing.
    """

    losses: Any
    logits: Any = None
    clean_logits: Any = None
    observed: Any = None


class TrainingStep(NamedTuple):
    """What one training step has in addition to images and labels.

    Attributes:
        seed: int pair that fixes every random draw.
        number: number of the step, for the schedules; None for the full radius.
        sample_weight: weight of each example; None for equal ones.
    """

    seed: Any = (0, 0)
    number: Any = None
    sample_weight: Any = None


class Sizes(NamedTuple):
    """How far, and by which steps, an adversary goes in one training step.

    Attributes:
        threat: the threat model, with the radius of this step; None without adversary.
        share: this radius as a share of the full one; 1 without a schedule of the radius.
        scheduled_step_size: what a schedule of the step size gives; None without such a schedule.
    """

    threat: Any
    share: Any = 1.0
    scheduled_step_size: Any = None

    def step_size(self, nominal):
        """The length of a step: the scheduled one, else the nominal one times the share."""
        if self.scheduled_step_size is not None:
            return self.scheduled_step_size
        return nominal * self.share

    def random_start(self, nominal):
        """The `random_start` of an attack, its radius times the share where it has one."""
        return nominal if isinstance(nominal, (bool, str)) else nominal * self.share


class Objective(Configurable, Sealed):
    """Base class of training objectives.

    A subclass sets its settings in its `__init__`. Afterwards they do not change: compiled code
    would go on with the old ones. `build` and training may add state under other names.

    With a schedule, `fit` reports the radius of the last batch as `epsilon`. Evaluation never
    follows the schedule: `robust_accuracy` is measured at the threat model's own epsilon. PAS's
    code tests at the radius of the current epoch, and so reports too much early on.

    Args:
        threat: the threat model trained against; None for training without adversary.
        label_smoothing: r of `losses.smoothed_cross_entropy`; 0 for none.
        epsilon_schedule: a Keras `LearningRateSchedule` that gives the radius e_t of training step
            t, 0 included. Steps are counted as for the learning rate: by batches, and by updates
            where an objective makes several of a batch (FreeAT). A batch has one radius.
        step_size_schedule: the same for the adversary's step size. Default: with an epsilon
            schedule, the step size times `e_t / (epsilon + 1e-6)`, as in PAS. A numeric radius of
            the random start is scaled too.

    Example:
        >>> import he_keras as he
        >>> from keras.optimizers.schedules import CosineDecay
        >>> growing = CosineDecay(0.0, 1000, warmup_target=0.4, warmup_steps=600)
        >>> objective = he.objectives.PGDAT(
        ...     he.ThreatModel("linf", 0.4), step_size=0.1, epsilon_schedule=growing
        ... )
        >>> sizes = objective.sizes_at(300)
        >>> round(float(sizes.threat.epsilon), 3), round(float(sizes.step_size(0.1)), 3)
        (0.2, 0.05)
    """

    may_grow = True
    #: Which training-mode passes update batch-norm statistics, in order.
    batch_norm_passes: tuple[str, ...] = ("adversarial",)
    #: Whether XLA can compile the training step.
    supports_jit = True
    #: How often a batch updates the weights; learning rates and radii count updates.
    updates_per_batch = 1
    #: Whether `after_update` needs the gradient of the loss by the crafted images.
    needs_image_gradient = False
    #: Whether further arguments are those of another objective, which checks them.
    passes_arguments_on = False

    def __init__(
        self,
        threat: ThreatModel | None = None,
        label_smoothing: float = 0.0,
        epsilon_schedule: LearningRateSchedule | None = None,
        step_size_schedule: LearningRateSchedule | None = None,
    ) -> None:
        if threat is not None and not isinstance(threat, ThreatModel):
            raise TypeError(f"Invalid threat; expected a ThreatModel; received threat={threat!r}")
        check_number("label_smoothing", label_smoothing, 0.0)
        if label_smoothing >= 1.0:
            raise ValueError(
                "Invalid label_smoothing; expected a number in [0, 1); "
                f"received label_smoothing={label_smoothing!r}"
            )
        _check_schedule("epsilon_schedule", epsilon_schedule, threat)
        _check_schedule("step_size_schedule", step_size_schedule, threat)
        self.threat = threat
        self.label_smoothing = float(label_smoothing)
        self.epsilon_schedule = epsilon_schedule
        self.step_size_schedule = step_size_schedule

    @property
    def follows_schedules(self) -> bool:
        """Whether the adversary's radius or step size changes from step to step."""
        return self.epsilon_schedule is not None or self.step_size_schedule is not None

    def sizes_at(self, step_number=None) -> Sizes:
        """Returns radius and step size of a training step; the full ones without a number."""
        if step_number is None or not self.follows_schedules:
            return Sizes(self.threat)
        step, threat, share, step_size = tf.convert_to_tensor(step_number), self.threat, 1.0, None
        if self.threat is not None and self.epsilon_schedule is not None:
            epsilon = tf.maximum(tf.cast(self.epsilon_schedule(step), tf.float32), 0.0)
            threat = with_radius(self.threat, epsilon)
            share = epsilon / (self.threat.epsilon + _SMALL_RADIUS)
        if self.step_size_schedule is not None:
            step_size = tf.maximum(tf.cast(self.step_size_schedule(step), tf.float32), 0.0)
        return Sizes(threat, share, step_size)

    def logs(self) -> dict:
        """Returns what `fit` reports in addition to metrics and the radius: mostly nothing."""
        return {}

    def logs_at(self, step_number) -> dict:
        """Returns `logs()`, and the radius of this training step where it follows a schedule."""
        if self.epsilon_schedule is None:
            return self.logs()
        return {"epsilon": self.sizes_at(step_number).threat.epsilon, **self.logs()}

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates state that depends on the image shape; most objectives have none."""

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Returns the examples to train on, without gradient; here the images themselves.

        Args:
            model: offers `model(images, training=...)`, `head`, `features`.
            images: clean images.
            labels: integer labels.
            seed: int pair that fixes every random draw.
            step_number: number of the training step, for the schedules; None for the full radius.
                An objective that is never used with schedules may leave this argument out.
        """
        return images

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """Runs the passes that are differentiated and returns losses and logits.

        Here one pass over the crafted examples, scored by the cross-entropy with the head's margin.
        """
        logits = model(x_adv, training=training)
        return TrainingPass(self.cross_entropy(model, logits, labels), logits)

    def cross_entropy(self, model, logits, labels):
        """Cross-entropy with the head's margin and the label smoothing; for training losses."""
        return margin_cross_entropy(model, logits, labels, self.label_smoothing)

    def loss(self, model, images, labels, x_adv, training: bool = True, seed=(0, 0)):
        """Returns the per-example losses of `forward`."""
        step = TrainingStep(seed)
        return self.forward_in_step(model, images, labels, x_adv, step, training).losses

    def craft_in_step(self, model, images, labels, step: TrainingStep):
        """`craft`, as a training step calls it: with the number of the step, if it matters."""
        if not self.follows_schedules:
            return self.craft(model, images, labels, step.seed)
        return self.craft(model, images, labels, step.seed, step.number)

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """`forward`, as a training step calls it.

        An objective overrides it if its losses depend on more than the arguments of `forward`. That
        may be random draws, a schedule, or the other examples of the batch, which count by their
        weights. The model applies the weights to the losses returned.
        """
        return self.forward(model, images, labels, x_adv, training)

    def after_update(self, images, x_adv, gradient, step: TrainingStep) -> None:
        """Changes the objective's own state after an update of the weights; most have none.

        Args:
            images: clean images.
            x_adv: what `craft` returned.
            gradient: that of the loss by `x_adv`, with `needs_image_gradient`; else None.
            step: the training step.
        """

    def observe(self, observed) -> None:
        """Changes the objective's own state by what `forward` has seen; most have none.

        Args:
            observed: that of the `TrainingPass`, without gradient; it is never None.
        """

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Returns training state other than weights, for checkpoints."""
        return {}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""


class IteratedObjective(Objective):
    """An objective whose adversary is the projected-gradient loop with fixed number of steps.

    Args:
        threat: the threat model trained against.
        num_steps: steps K of the adversary.
        step_size: length of a step; default 0.007 / 0.031 of epsilon, the released ratio (the HE
            paper's text says 2/255 at 8/255).
        random_start: see `ProjectedGradient`; default "gaussian", 0.001 * N(0, I) as in the
            released code (the paper's text says uniform: True).
        **kwargs: see `Objective`.
    """

    attack_loss = "ce"

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 10,
        step_size: float | str | None = None,
        random_start: bool | float | str = "gaussian",
        **kwargs,
    ) -> None:
        super().__init__(threat, **kwargs)
        self.attack = training_attack(threat, num_steps, step_size, random_start, self.attack_loss)
        self.num_steps = self.attack.num_steps
        self.step_size = self.attack.step_size
        self.random_start = self.attack.random_start

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Runs the adversary in inference mode and returns its last iterate."""
        victim, sizes = Victim(model), self.sizes_at(step_number)
        return last_iterate(self.attack, victim, images, labels, seed, sizes)


def training_attack(threat, num_steps, step_size, random_start, loss="ce") -> ProjectedGradient:
    """The adversary inside a training step: all examples run to the end, last iterate returned."""
    if threat is None:
        raise ValueError(
            "This objective needs a threat model; expected a ThreatModel; received None"
        )
    return ProjectedGradient(
        threat,
        num_steps,
        step_size=threat.epsilon * 0.007 / 0.031 if step_size is None else step_size,
        random_start=random_start,
        loss=loss,
        keep="last",
        stop_when_broken=False,
    )


def last_iterate(attack: ProjectedGradient, victim: Victim, images, labels, seed, sizes: Sizes):
    """Returns the last iterate of a training attack at the sizes of a step, without gradient."""
    start = sizes.threat.start(sizes.random_start(attack.random_start), images, seed)
    x_adv = attack.ascend(
        victim.for_many_passes(),
        images,
        labels,
        start,
        threat=sizes.threat,
        step_size=sizes.step_size(attack.step_size),
    ).x_adv
    return tf.stop_gradient(sizes.threat.project(x_adv, images))


def weighted(losses, sample_weight):
    """Losses times the weights of the examples, where there are any."""
    if sample_weight is None:
        return losses
    return losses * tf.cast(tf.reshape(sample_weight, [-1]), losses.dtype)


def _check_schedule(name: str, schedule, threat) -> None:
    if schedule is None:
        return
    if not isinstance(schedule, LearningRateSchedule):
        raise TypeError(
            f"Invalid {name}; expected a keras.optimizers.schedules.LearningRateSchedule such as "
            f"those of he_keras.schedules; received {name}={schedule!r}"
        )
    if threat is None:
        raise ValueError(
            f"{name} without an adversary; expected a threat model with it; received threat=None"
        )


def margin_cross_entropy(model, logits, labels, smoothing: float = 0.0):
    """Cross-entropy with the head's margin on the true class (plain for heads without margin)."""
    logits = with_margin(model, logits, labels)
    if smoothing:
        return losses.smoothed_cross_entropy(logits, labels, smoothing)
    return losses.cross_entropy(logits, labels)


def with_margin(model, logits, labels):
    """Logits with the head's margin on the true class (unchanged for heads without margin)."""
    has_margin = hasattr(model.head, "with_margin")
    return model.head.with_margin(logits, labels) if has_margin else logits


def unscaled(model, logits):
    """Logits at scale 1: cosines or negative angles for an HE head, unchanged for others."""
    scale = getattr(model.head, "scale", None)
    return logits if scale is None else logits / tf.cast(scale, logits.dtype)
