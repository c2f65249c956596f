"""Targeted APGD: ascents towards one class after the other."""

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_choice, check_positive_integer
from he_keras.attacks.apgd import APGD
from he_keras.attacks.framework.boundary import nearest_classes
from he_keras.attacks.framework.result import Best, Crafted, Goal, other_classes
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.threat import ThreatModel

TARGET_ORDERS = ("logit", "distance")


@register("apgd-t", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class APGDTargeted(APGD):
    """APGD towards one class after the other, the likeliest first by the clean prediction.

    With `target_order="distance"` the class of the nearest linearised boundary comes first: that of
    the smallest difference of logits, divided by the dual norm of the gradient of the difference.
    Among many classes the nearest one is often not the likeliest.

    Any misclassification ends the work on an example, whatever the target. Returns a misclassified
    point, else the point of the largest loss over all targets. Examples that are misclassified from
    the start are left alone, also with `stop_when_broken=False`. As in AutoAttack, that only
    finishes the run towards the target that succeeded.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`. The order by distance: Melamed et al.
        2024, "MALT powers up adversarial attacks".
    Assumes: logits with a useful gradient in the images, whatever their scale, and 4 classes for
        "dlr-targeted".
    Cost: one forward pass to rank the targets, and for each target that no success precedes the
        passes of `APGD`: with 9 targets and 100 steps, 909 forward and backward passes. The order
        by distance takes one backward pass more for each candidate.
    Deviations: those of `APGD`. The order by distance divides by the norm that is dual to the
        threat model's, in every norm.

    Args:
        threat: the threat model.
        loss: "dlr-targeted" (needs 4 classes), or "cw", the target's logit minus the true one.
        num_steps: number of steps for each target.
        num_targets: number of targets; models with fewer classes have `classes - 1`.
        target_order: "logit", or "distance".
        num_candidates: how many classes of largest logit "distance" compares, at most.
        **kwargs: see `APGD`.

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> threat = he.ThreatModel("linf", 0.1)
        >>> attack = he.attacks.APGDTargeted(threat, loss="cw", num_steps=10)
        >>> images = np.array([[0.5, 0.4, 0.45]], "float32")
        >>> result = attack(lambda images: images, images, np.array([0]))
        >>> bool(result.success[0])
        True
    """

    has_targeted_form = False
    loss_names = ("dlr-targeted", "cw")

    def __init__(
        self,
        threat: ThreatModel,
        loss: str = "dlr-targeted",
        num_steps: int = 100,
        num_targets: int = 9,
        target_order: str = "logit",
        num_candidates: int = 100,
        name: str = "apgd-t",
        **kwargs,
    ) -> None:
        super().__init__(threat, loss, num_steps, name=name, **kwargs)
        check_positive_integer("num_targets", num_targets)
        check_choice("target_order", target_order, TARGET_ORDERS)
        check_positive_integer("num_candidates", num_candidates)
        if num_candidates < num_targets:
            raise ValueError(
                "Too few candidates for the targets; expected num_candidates >= num_targets; "
                f"received num_candidates={num_candidates!r}, num_targets={num_targets!r}"
            )
        self.num_targets = int(num_targets)
        self.target_order = target_order
        self.num_candidates = int(num_candidates)

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        compared = self.num_candidates if self.target_order == "distance" else 0
        num_others = num_classes - 1
        towards_targets = min(self.num_targets, num_others) * super().passes_of_run(num_classes)
        return min(compared, num_others) + towards_targets

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs the ascent for one target after the other."""
        clean_logits, classes, compared = self._targets(victim, images, labels)
        goal = Goal(labels)
        best = Best.before(images, images)._replace(broken=goal.is_reached(clean_logits))

        def one_target(index, state, _inputs):
            best, passes = state
            targets = tf.gather(classes, index, axis=1)
            start = self._start(images, seeds, index)
            found = self.search(victim, (images, goal, targets), start, skip=best.broken)
            x_adv = select_rows(found.broken, found.adversarial, found.best.point[0])
            best = best.updated(x_adv, found.best.strength, found.broken)
            return best, passes + found.passes

        state = best, tf.zeros_like(labels, tf.int32)
        best, passes = iterate(one_target, state, (), tf.shape(classes)[1])
        return Crafted(best.point, passes + 1, passes + compared)

    def _targets(self, victim: Victim, images, labels):
        """Returns clean logits, the targets in their order, and how many gradients that took."""
        if self.target_order == "logit":
            logits = victim.logits(images)
            return logits, other_classes(logits, labels, self.num_targets), 0
        candidates = images, labels, self.threat.norm, self.num_candidates
        logits, classes, compared = nearest_classes(victim, *candidates)
        return logits, classes[:, : self.num_targets], compared

    def loss_function(self, logits, goal: Goal, targets=None):
        """Returns the loss to ascend for each example, towards its target of this run."""
        if self.loss == "dlr-targeted":
            return losses.dlr_targeted(logits, goal.labels, targets)
        return losses.true_logit(logits, targets) - losses.true_logit(logits, goal.labels)
