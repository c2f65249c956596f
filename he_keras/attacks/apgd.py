"""APGD and targeted APGD: projected gradient ascent that chooses its own step sizes."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import losses
from he_keras.attacks.apgd_loop import Ascent, State
from he_keras.attacks.attack import Attack, is_wrong
from he_keras.attacks.checks import check_flag, check_number, check_positive_integer
from he_keras.attacks.registry import register
from he_keras.attacks.result import Crafted
from he_keras.attacks.survivors import iterate, select_rows
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel, draw_per_seed

# Radii of the l1 schedule in epsilons, and the share of the steps that the first two each take.
_LARGER_EPSILONS = (3.0, 2.0, 1.0)
_SHARE_OF_LARGER = 0.3


@keras.saving.register_keras_serializable(package="he_keras")
class APGD(Attack):
    """Untargeted APGD: returns a misclassified point, else the point of the largest loss.

    Each example starts with steps of 2 * epsilon (l1: epsilon). At fixed checks the step is halved,
    and the example taken up at its best point again, where the loss rose too rarely or did not
    improve. In l1 a step changes only the pixels of the largest gradient, and a check sets their
    number.

    Paper: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks" (linf, l2); Croce & Hein 2021, "Mind the box: l1-APGD for
        sparse adversarial attacks on image classifiers" (l1).
    Assumes: a loss with a useful gradient in the images. The cross-entropy of a model with large
        logits underflows to a zero gradient; "dlr" and "cw" do not depend on the scale.
    Cost: `num_steps + 1` forward and backward passes (times `eot_samples`), 2 more with
        `larger_epsilons`.
    Deviations: from AutoAttack's code: with `stop_when_broken` (the default) the first
        misclassified point is returned, not the last one; where none is found, the point of the
        largest loss, not the image; the step of an l2 attack keeps its length for a gradient below
        1e-12; in l1, numbers of pixels are exact, where rounding decides about single ones there.
        As in that code, the first loss after the start is compared with zero, not with the start's
        loss.

    Args:
        threat: the threat model.
        loss: "ce", "dlr" or "cw" (margin).
        num_steps: number of steps, over all radii.
        rho: share of steps that must raise the loss for the step size to stay (linf, l2).
        eot_samples: passes over which the gradient of a randomised model is averaged.
        random_start: True draws from the sphere (linf: noise divided by its largest entry; l2: a
            Gaussian direction; l1: Gaussian noise, projected); False starts at the image.
        larger_epsilons: l1 only: ascends in balls of 3, 2 and 1 epsilon, each from the best point
            of the one before, as AutoAttack does.
        **kwargs: see `Attack`. The best point is part of the algorithm: `keep` must be "best".

    Example:
        >>> import he_keras as he, numpy as np, tensorflow as tf
        >>> attack = he.attacks.get("apgd-ce-10", he.ThreatModel("linf", 0.1), random_start=False)
        >>> weights = tf.constant([[1.0, -1.0], [0.5, -0.5]])
        >>> images = np.array([[0.5, 0.5]], "float32")
        >>> result = attack(lambda images: images @ weights, images, np.array([0]))
        >>> [round(float(pixel), 3) for pixel in result.x_adv[0]]
        [0.4, 0.4]
    """

    #: Losses by name.
    losses_by_name: dict[str, Any] = losses.ATTACK_LOSSES

    def __init__(
        self,
        threat: ThreatModel,
        loss: str = "ce",
        num_steps: int = 100,
        rho: float = 0.75,
        eot_samples: int = 1,
        random_start: bool = True,
        larger_epsilons: bool = False,
        name: str = "apgd",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("eot_samples", eot_samples)
        self.loss = loss
        self.num_steps = int(num_steps)
        self.rho = _checked_rho(rho)
        self.eot_samples = int(eot_samples)
        check_flag("random_start", random_start)
        check_flag("larger_epsilons", larger_epsilons)
        self.random_start = random_start
        self.larger_epsilons = larger_epsilons
        self._check_choices()
        self.min_classes = losses.MIN_CLASSES[self.loss]
        self.ascents = self._build_ascents()

    def _check_choices(self) -> None:
        if self.loss not in self.losses_by_name:
            raise ValueError(
                f"Unknown attack loss; expected one of {tuple(self.losses_by_name)}; "
                f"received loss={self.loss!r}"
            )
        if self.keep != "best":
            raise ValueError(
                f'APGD returns its best point; expected keep="best"; received keep={self.keep!r}'
            )
        if not self.larger_epsilons:
            return
        if self.threat.norm != "l1":
            raise ValueError(
                "larger_epsilons belongs to l1; expected a threat model of norm='l1'; "
                f"received norm={self.threat.norm!r}"
            )
        if self.num_steps < len(_LARGER_EPSILONS):
            raise ValueError(
                f"Too few steps for larger_epsilons; expected at least {len(_LARGER_EPSILONS)}; "
                f"received num_steps={self.num_steps}"
            )

    def _build_ascents(self) -> list[Ascent]:
        """One ascent, or with `larger_epsilons` three, of which only the last can break."""
        if not self.larger_epsilons:
            ascent = Ascent(
                self.threat, self.num_steps, self.rho, self.eot_samples, self.stop_when_broken
            )
            return [ascent]
        # At least one step is left for epsilon itself.
        larger = min(math.ceil(_SHARE_OF_LARGER * self.num_steps), (self.num_steps - 1) // 2)
        steps = [larger, larger, self.num_steps - 2 * larger]
        ascents = []
        for factor, num_steps in zip(_LARGER_EPSILONS, steps, strict=True):
            is_last = factor == _LARGER_EPSILONS[-1]
            ascents.append(
                Ascent(
                    ThreatModel("l1", factor * self.threat.epsilon, self.threat.bounds),
                    num_steps,
                    eot_samples=self.eot_samples,
                    stop_when_broken=self.stop_when_broken and is_last,
                    continues=True,
                )
            )
        return ascents

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs the ascent from the start."""
        state = self.search(victim, (images, labels), self._start(images, seeds))
        x_adv = select_rows(state.broken, state.adversarial, state.best)
        return Crafted(x_adv, state.passes, state.passes)

    def search(self, victim: Victim, inputs, start, skip=None) -> State:
        """Returns the final state of the ascent, whose entries say more than `run`.

        Args:
            victim: the classifier.
            inputs: images and labels (targeted: and targets).
            start: the points to start from, which may lie outside the ball and the bounds.
            skip: mask of examples to leave alone.
        """
        loss_function = self.losses_by_name[self.loss]
        passes = tf.zeros(tf.shape(start)[:1], tf.int32)
        for ascent in self.ascents:
            state = ascent.run(victim, loss_function, inputs, start, skip)
            start = state.best
            passes += state.passes
        return state._replace(passes=passes)

    def _start(self, images, seeds, number: int | Any = 0):
        """Draws the start; `number` tells several starts of one example apart."""
        if not self.random_start:
            return images

        def sample(shape, seed, dtype):
            return _STARTS[self.threat.norm](shape, tf.random.fold_in(seed, number), dtype)

        noise = draw_per_seed(sample, images, seeds)
        # In l1 the noise itself is projected.
        return images + (noise if self.threat.norm == "l1" else self.threat.epsilon * noise)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "loss": self.loss,
            "num_steps": self.num_steps,
            "rho": self.rho,
            "eot_samples": self.eot_samples,
            "random_start": self.random_start,
            "larger_epsilons": self.larger_epsilons,
        }


class _Targets(NamedTuple):
    """State of the loop over targets; every entry has one row per example."""

    x_adv: Any
    loss: Any
    broken: Any
    passes: Any


@register("apgd-t", budget="num_steps")
@keras.saving.register_keras_serializable(package="he_keras")
class APGDTargeted(APGD):
    """APGD towards one class after the other, the likeliest first by the clean prediction.

    Any misclassification ends the work on an example, whatever the target. Returns a misclassified
    point, else the point of the largest loss over all targets. Examples that are misclassified from
    the start are left alone, also with `stop_when_broken=False`, which as in AutoAttack only
    finishes the run towards the target that succeeded.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`.
    Assumes: logits with a useful gradient in the images, whatever their scale, and 4 classes for
        "dlr-targeted".
    Cost: one forward pass to rank the targets, and for each target that no success precedes the
        passes of `APGD`: with 9 targets and 100 steps, 909 forward and backward passes.
    Deviations: those of `APGD`, no others.

    Args:
        threat: the threat model.
        loss: "dlr-targeted" (needs 4 classes), or "cw", the target's logit minus the true one.
        num_steps: number of steps for each target.
        num_targets: number of targets; models with fewer classes have `classes - 1`.
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

    losses_by_name: dict[str, Any] = {
        "dlr-targeted": losses.dlr_targeted,
        "cw": lambda logits, labels, targets: (
            losses.true_logit(logits, targets) - losses.true_logit(logits, labels)
        ),
    }

    def __init__(
        self,
        threat: ThreatModel,
        loss: str = "dlr-targeted",
        num_steps: int = 100,
        num_targets: int = 9,
        name: str = "apgd-t",
        **kwargs,
    ) -> None:
        super().__init__(threat, loss, num_steps, name=name, **kwargs)
        check_positive_integer("num_targets", num_targets)
        self.num_targets = int(num_targets)

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Runs the ascent for one target after the other."""
        clean_logits = victim.logits(images)
        num_classes = tf.shape(clean_logits)[-1]
        num_targets = tf.minimum(self.num_targets, num_classes - 1)
        ranking = tf.math.top_k(clean_logits, k=num_targets + 1).indices
        state = _Targets(
            x_adv=images,
            loss=tf.fill(tf.shape(labels), images.dtype.min),
            broken=is_wrong(clean_logits, labels),
            passes=tf.zeros_like(labels, tf.int32),
        )

        def one_target(index, state, _inputs):
            targets = tf.gather(ranking, index + 1, axis=1)
            start = self._start(images, seeds, index)
            found = self.search(victim, (images, labels, targets), start, skip=state.broken)
            return _stronger(state, found)

        state = iterate(one_target, state, (), num_targets)
        return Crafted(state.x_adv, state.passes + 1, state.passes)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {**super().get_config(), "num_targets": self.num_targets}


@register("apgd-ce", budget="num_steps")
def APGDCE(threat: ThreatModel, num_steps: int = 100, **options) -> APGD:
    """APGD on the cross-entropy.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`.
    Assumes: a useful gradient of the cross-entropy, which large logits can underflow to zero.
    Cost: `num_steps + 1` forward and backward passes; see `APGD`.
    Deviations: those of `APGD`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("apgd-ce-50", he.ThreatModel()).num_steps
        50
    """
    return APGD(threat, **{"loss": "ce", "num_steps": num_steps, "name": "apgd-ce", **options})


@register("apgd-dlr", budget="num_steps")
def APGDDLR(threat: ThreatModel, num_steps: int = 100, **options) -> APGD:
    """APGD on the difference of logits ratio, which does not depend on the logits' scale.

    Paper: Croce & Hein 2020 and, for l1, 2021: see `APGD`.
    Assumes: logits with a useful gradient in the images, whatever their scale; 3 classes.
    Cost: `num_steps + 1` forward and backward passes; see `APGD`.
    Deviations: those of `APGD`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("apgd-dlr", he.ThreatModel()).min_classes
        3
    """
    return APGD(threat, **{"loss": "dlr", "num_steps": num_steps, "name": "apgd-dlr", **options})


def _stronger(state: _Targets, found: State) -> _Targets:
    """Takes over what the search for one target found; skipped examples found nothing."""
    x_adv = select_rows(found.broken, found.adversarial, found.best)
    better = found.broken | (~state.broken & (found.best_loss > state.loss))
    return _Targets(
        x_adv=select_rows(better, x_adv, state.x_adv),
        loss=tf.where(better, found.best_loss, state.loss),
        broken=state.broken | found.broken,
        passes=state.passes + found.passes,
    )


def _linf_sphere(shape, seed, dtype):
    noise = tf.random.stateless_uniform(shape, seed, -1.0, 1.0, dtype)
    largest = tf.reduce_max(tf.abs(noise), axis=_example_axes(shape), keepdims=True)
    return tf.math.divide_no_nan(noise, largest)


def _l2_sphere(shape, seed, dtype):
    noise = tf.random.stateless_normal(shape, seed, dtype=dtype)
    squares = tf.reduce_sum(tf.square(noise), axis=_example_axes(shape), keepdims=True)
    return tf.math.divide_no_nan(noise, tf.sqrt(squares))


def _standard_normal(shape, seed, dtype):
    return tf.random.stateless_normal(shape, seed, dtype=dtype)


_STARTS = {"linf": _linf_sphere, "l2": _l2_sphere, "l1": _standard_normal}


def _example_axes(shape):
    return tf.range(1, tf.size(shape))


def _checked_rho(rho) -> float:
    check_number("rho", rho, 0.0)
    if rho > 1.0:
        raise ValueError(f"Invalid rho; expected a number in [0, 1]; received rho={rho!r}")
    return float(rho)
