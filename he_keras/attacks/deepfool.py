"""DeepFool: steps onto the nearest linearised decision boundary until the class changes."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_number, check_positive_integer
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.boundary import nearest_boundary
from he_keras.attacks.framework.result import Crafted, Goal, is_wrong, other_classes
from he_keras.attacks.framework.rows import iterate, mask_like, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.threat import ThreatModel

#: As in foolbox: added to each step, in widths of the bounds, so that a flat boundary is crossed.
_EXTRA_LENGTH = 1e-4


class _State(NamedTuple):
    """Loop state; every entry has one row per example."""

    x_adv: Any
    perturbation: Any
    broken: Any
    forward_passes: Any
    backward_passes: Any


@register("deepfool", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class DeepFool(Attack):
    """Steps onto the nearest linearised boundary until the class changes.

    Each iteration adds a step to the perturbation `r`: the step onto the nearest of the linearised
    boundaries. It then goes to `x + (1 + overshoot) * r`, clipped to the bounds. It finds a close
    adversarial image quickly, not the closest: use FAB for that.

    Paper: Moosavi-Dezfooli et al. 2016, "DeepFool: a simple and accurate method to fool deep neural
        networks".
    Assumes: logits that are differentiable in the image; their scale does not matter.
    Cost: one forward pass, then 2 forward and `num_candidates - 1` backward passes per iteration.
        An example ends as soon as it is misclassified, after about 3 iterations.
    Deviations: from the published loop, all as in foolbox. Candidate classes are those of largest
        clean logit. A step is longer by 1e-4 of the width of the bounds, so that a flat boundary is
        crossed. The image is clipped. An image is checked right after each step, which saves the
        backward passes of an iteration. Released variants that apply the overshoot to every single
        step, or divide the linf step by the l2 norm, are other attacks.

    Args:
        threat: the threat model; epsilon only decides what counts as success.
        num_steps: most iterations.
        overshoot: how much farther than onto the boundary, relative to the whole perturbation.
        num_candidates: classes considered, the predicted one included.
        stop_when_broken: makes no difference here, because an example always ends when its class
            changes.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> from he_keras.attacks.deepfool import DeepFool
        >>> attack = DeepFool(he.ThreatModel("linf", 0.1))
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.1, 0.2]], "float32")
        >>> result = attack(lambda images: images @ weights - [0.1, -0.1], images, np.array([0]))
        >>> print(round(float(result.distance[0]), 3))
        0.068
    """

    norms = ("linf", "l2")
    minimum_norm = True

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 50,
        overshoot: float = 0.02,
        num_candidates: int = 10,
        stop_when_broken: bool = False,
        name: str = "deepfool",
        **kwargs,
    ) -> None:
        super().__init__(threat, stop_when_broken=stop_when_broken, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_number("overshoot", overshoot, 0.0)
        check_positive_integer("num_candidates", num_candidates)
        if num_candidates < 2:
            raise ValueError(
                "Too few candidate classes; expected at least 2, the predicted one included; "
                f"received num_candidates={num_candidates!r}"
            )
        self.num_steps = int(num_steps)
        self.overshoot = float(overshoot)
        self.num_candidates = int(num_candidates)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        # Each step takes two forward passes, and a gradient of each boundary that it compares.
        return (1 + num_classes) * self.num_steps + 1

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs the loop on one batch; nothing is random."""
        candidates = other_classes(victim.logits(images), labels, self.num_candidates - 1)
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        state = _State(
            x_adv=images,
            perturbation=tf.zeros_like(images),
            broken=tf.zeros_like(passes, tf.bool),
            forward_passes=passes + 1,
            backward_passes=passes,
        )

        def step(_index, state, inputs):
            return self._step(victim, *inputs, state)

        inputs = images, labels, candidates
        state = iterate(step, state, inputs, self.num_steps, lambda state: ~state.broken)
        distance = tf.where(state.broken, self.threat.distance(state.x_adv, images), np.inf)
        x_adv = select_rows(state.broken, state.x_adv, images)
        return Crafted(x_adv, state.forward_passes, state.backward_passes, distance)

    def _step(self, victim, images, labels, candidates, state: _State) -> _State:
        boundary, backward_passes = nearest_boundary(
            victim, state.x_adv, Goal(labels), self.threat.norm, candidates
        )
        low, high = self.threat.bounds
        length = boundary.distance + _EXTRA_LENGTH * (high - low)
        step = mask_like(length, images) * self.threat.steepest_step(boundary.gradient)
        perturbation = state.perturbation + step
        x_adv = self.threat.clip_to_bounds(images + (1.0 + self.overshoot) * perturbation)
        return _State(
            x_adv=x_adv,
            perturbation=perturbation,
            broken=is_wrong(victim.logits(x_adv), labels),
            forward_passes=state.forward_passes + 2,
            backward_passes=state.backward_passes + backward_passes,
        )
