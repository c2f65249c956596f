"""The attacks of the cleverhans library (4.0.0), scored and reported like the others.

They are a second opinion: the settings are those of our attack of the same name, and cleverhans
runs it. Ours give the same images faster. cleverhans returns its last iterate and never stops
early. Only examples that are misclassified from the start are left out. The library is imported
when an attack is built.
"""

import importlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_choice
from he_keras.attacks.attack_names import Entry, look_up, with_given
from he_keras.attacks.carlini_wagner import CarliniWagnerL2
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import Crafted, is_wrong
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.projected_gradient import FGSM, ProjectedGradient
from he_keras.attacks.registry import check_attack_options, register
from he_keras.threat import ThreatModel, checked_start

#: Of each iterated attack, the start and the momentum by default.
_ITERATED = {"bim": (False, None), "pgd": (False, None), "madry": (True, None), "mim": (False, 1.0)}
_ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}


class _Cleverhans(Attack):
    """What the attacks of cleverhans share: they run eagerly, on one compiled model."""

    runs_in_graph = False
    #: Where cleverhans has it: the module, and the function or class in it.
    source = ("projected_gradient_descent", "projected_gradient_descent")
    #: Settings of our attack that cleverhans does not have, with the only value that they take.
    fixed: dict[str, Any] = {"keep": "last"}

    def __init__(self, threat: ThreatModel, *, keep: str = "last", **kwargs) -> None:
        super().__init__(threat, keep=keep, **kwargs)
        self.has_targeted_form = False
        self._check_fixed(self.fixed)
        self._attack = _imported(*self.source)
        self._compiled_logits: tuple[Any, Any] = (None, None)

    def _check_fixed(self, fixed: dict[str, Any]) -> None:
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"In cleverhans, {self.name} has only one {name}; expected {name}={value!r}; "
                    f"received {name}={getattr(self, name)!r}"
                )

    def check_model(self, model, images, labels) -> None:
        super().check_model(model, images, labels)
        # cleverhans would go on with a gradient of None.
        cross_entropy = lambda logits: losses.cross_entropy(logits, labels[:1])  # noqa: E731
        loss_and_gradient(Victim(model), cross_entropy, tf.constant(images[:1]))

    def _logits_of(self, victim: Victim):
        """One compiled function for each victim; cleverhans traces its gradient for every size."""
        if self._compiled_logits[0] is not victim:
            self._compiled_logits = victim, tf.function(victim.logits, reduce_retracing=True)
        return self._compiled_logits[1]


class _GradientAttack(_Cleverhans, ProjectedGradient):
    fixed = {"keep": "last", "loss": "ce", "margin": 0.0, "eot_samples": 1}

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs cleverhans on one batch."""
        low, high = self.threat.bounds
        x_adv = self._attack(
            self._logits_of(victim),
            tf.cast(images, tf.float32),
            eps=self.threat.epsilon,
            norm=_ORDERS[self.threat.norm],
            clip_min=low,
            clip_max=high,
            y=labels,
            sanity_checks=False,
            **self._settings(),
        )
        passes = tf.fill(tf.shape(labels), self.num_steps)
        return Crafted(tf.cast(x_adv, images.dtype), passes, passes)

    def _settings(self) -> dict[str, Any]:
        return {}


@keras.saving.register_keras_serializable(package="he_keras")
class CleverhansFGSM(_GradientAttack, FGSM):
    """`fast_gradient_method` of cleverhans: one step of length epsilon.

    Args:
        threat: the threat model.
        **kwargs: see `Attack`.
    """

    source = ("fast_gradient_method", "fast_gradient_method")

    def __init__(self, threat: ThreatModel, name: str = "cleverhans:fgsm", **kwargs) -> None:
        super().__init__(threat, name=name, **kwargs)
        self._check_fixed({"num_steps": 1, "step_size": threat.epsilon, "random_start": False})


@keras.saving.register_keras_serializable(package="he_keras")
class CleverhansIterated(_GradientAttack):
    """`projected_gradient_descent` or `momentum_iterative_method` of cleverhans.

    Args:
        threat: the threat model, linf or l2.
        attack: "bim", "pgd", "madry" or "mim".
        num_steps: number of steps.
        step_size: length of a step; default 2.5 * epsilon / num_steps, at most epsilon.
        random_start: False starts at the image, True draws uniformly from the ball, a number is the
            radius of the start. By default only "madry" starts at random; "mim" never does.
        decay: momentum of "mim"; default 1.
        **kwargs: see `Attack`.
    """

    norms = ("linf", "l2")

    def __init__(
        self,
        threat: ThreatModel,
        attack: str = "pgd",
        num_steps: int = 20,
        step_size: float | str | None = None,
        random_start: bool | float | None = None,
        decay: float | None = None,
        name: str = "cleverhans:pgd",
        **kwargs,
    ) -> None:
        check_choice("attack", attack, _ITERATED)
        if attack == "mim":
            self.source = ("momentum_iterative_method", "momentum_iterative_method")
        start, momentum = _ITERATED[attack]
        super().__init__(
            threat,
            num_steps=num_steps,
            step_size=step_size,
            random_start=start if random_start is None else checked_start(random_start, False),
            decay=momentum if decay is None else decay,
            name=name,
            **kwargs,
        )
        self.attack = attack
        if step_size is None:
            self.step_size = min(self.step_size, threat.epsilon)
        if self.step_size > threat.epsilon:
            raise ValueError(
                "cleverhans takes no step longer than epsilon; expected step_size <= "
                f"{threat.epsilon}; received step_size={step_size!r}"
            )
        self._check_fixed({"random_start": False} if attack == "mim" else {"decay": None})

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"eps_iter": self.step_size, "nb_iter": self.num_steps}
        if self.attack == "mim":
            return {**settings, "decay_factor": self.decay}
        radius = self.threat.epsilon if self.random_start is True else self.random_start
        return {**settings, "rand_init": self.random_start is not False, "rand_minmax": radius}


@keras.saving.register_keras_serializable(package="he_keras")
class CleverhansCWL2(_Cleverhans, CarliniWagnerL2):
    """`CarliniWagnerL2` of cleverhans, one image at a time: slow.

    Args:
        threat: the threat model, l2; epsilon only decides what counts as broken.
        num_steps: most steps for each value of the trade-off.
        **kwargs: see `CarliniWagnerL2`. By default cleverhans's: 5 for `binary_search_steps`, 0.01
            for `initial_const`, 0.005 for `learning_rate`, and `abort_early`. It always searches to
            the end, whatever `stop_when_broken` says.
    """

    runs_inside_graphs = False
    source = ("carlini_wagner_l2", "CarliniWagnerL2")

    def __init__(self, threat: ThreatModel, num_steps: int = 1000, **kwargs) -> None:
        search = {"binary_search_steps": 5, "initial_const": 0.01, "learning_rate": 0.005}
        defaults = {**search, "abort_early": True, "name": "cleverhans:cw-l2"}
        super().__init__(threat, num_steps=num_steps, **{**defaults, **kwargs})

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Runs cleverhans on each image."""
        if images.shape.rank != 4:
            raise ValueError(
                "cleverhans's cw-l2 takes images only; expected shape (n, height, width, "
                f"channels); received {tuple(images.shape)}"
            )
        low, high = self.threat.bounds
        attack = self._attack(
            self._logits_of(victim),
            batch_size=1,
            clip_min=low,
            clip_max=high,
            binary_search_steps=self.binary_search_steps,
            max_iterations=self.num_steps,
            abort_early=self.abort_early,
            confidence=self.confidence,
            initial_const=self.initial_const,
        )
        found, steps = [], []
        for image in tf.cast(images, tf.float32):
            attack.optimizer = _Adam(self.learning_rate)
            found.append(attack.attack(image[tf.newaxis]))
            steps.append(attack.optimizer.steps)
        x_adv = tf.cast(tf.concat(found, axis=0), images.dtype)
        broken = is_wrong(victim.logits(x_adv), labels)
        distance = tf.where(broken, self.threat.distance(x_adv, images), np.inf)
        passes = tf.constant(steps, tf.int32)
        # It asks for the prediction first; what it found is judged here.
        return Crafted(x_adv, passes + 2, passes, distance)


class _Adam:
    """Keras's Adam under the names of Keras 2 that cleverhans calls; counts its steps."""

    def __init__(self, learning_rate: float) -> None:
        self.adam = keras.optimizers.Adam(learning_rate)
        self.steps = 0

    def variables(self) -> list:
        """The step number and the moments, without the learning rate: cleverhans zeroes them."""
        return [each for each in self.adam.variables if each.name != "learning_rate"]

    def apply_gradients(self, gradients) -> None:
        """Takes one step."""
        self.steps += 1
        self.adam.apply_gradients(gradients)


_ATTACKS = {
    "fgsm": Entry(CleverhansFGSM, None, None),
    "cw-l2": Entry(CleverhansCWL2, "num_steps", None),
    **dict.fromkeys(_ITERATED, Entry(CleverhansIterated, "num_steps", None)),
}


@register("cleverhans", argument="attack")
def Cleverhans(threat: ThreatModel, attack: str, **options) -> Attack:
    """Builds the attack of cleverhans that has this name; a number sets `num_steps`: "pgd-20".

    `get("cleverhans:pgd-20", threat)` runs `cleverhans.tf2.attacks.projected_gradient_descent`.
    "fgsm", "bim", "pgd", "madry" and "mim" run as they are. "cw-l2" gets an optimizer that Keras 3
    has. Its search for the trade-off handles one image at a time. "spsa" does not run with Keras 3.

    Paper: Papernot et al. 2018, "Technical report on the CleverHans v2.1.0 adversarial examples
        library"; for each attack, see the one of the same name in this package.
    Assumes: logits with a useful gradient in the images.
    Cost: one forward and backward pass per step; cw-l2 up to `binary_search_steps * num_steps`.
    Deviations: none in the attacks. cleverhans draws a random start (`random_start`, off by default
        except in "madry") from TensorFlow's global seed: `seed` has no influence on it, nor is it
        the same for every batch size. Its cw-l2 gives the trade-off to every pixel, so that
        `initial_const` weighs as many times more as an image has pixels.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("cleverhans:pgd-20", he.ThreatModel()).num_steps
        20
    """
    base = attack.lower().partition("-")[0]
    if base == "spsa":
        raise ValueError(
            'cleverhans\'s SPSA fails with Keras 3; expected "spsa-K" of this package; received '
            f"attack={attack!r}"
        )
    entry, given = look_up(attack, _ATTACKS, "attack of cleverhans")
    if base in _ITERATED:
        given = {**given, "attack": base}
    options = with_given(attack, given, options)
    check_attack_options(f"cleverhans:{attack}", entry.factory, options)
    return entry.factory(threat, **options)


def _imported(module: str, name: str):
    try:
        return getattr(importlib.import_module(f"cleverhans.tf2.attacks.{module}"), name)
    except ImportError as error:
        raise ValueError(
            "cleverhans is missing; expected `pip install cleverhans==4.0.0` to have been run; "
            f"received {error}"
        ) from error
