"""The attacks of the cleverhans library (4.0.0), scored and reported like the others.

They are a second opinion: `fgsm`, `bim-K`, `pgd-K` and `mim-K` of this package give the same images
faster. cleverhans returns its last iterate and never stops early. Only examples that are
misclassified from the start are left out. The library is imported when an attack is built.
"""

import importlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import (
    check_choice,
    check_number,
    check_positive_integer,
    parse_epsilon,
    positive_number,
)
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import loss_and_gradient
from he_keras.attacks.framework.result import Crafted, is_wrong
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.registry import register
from he_keras.threat import ThreatModel, checked_start

#: Module of each iterated attack, and the argument that only it has.
_ITERATED = {
    "bim": ("basic_iterative_method", None),
    "pgd": ("projected_gradient_descent", "random_start"),
    "madry": ("madry_et_al", "random_start"),
    "mim": ("momentum_iterative_method", "decay"),
}
ATTACKS = ("fgsm", *_ITERATED, "cw-l2")
_ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}


class _CleverhansAttack(Attack):
    """What the attacks of cleverhans share: they run eagerly, on one compiled model."""

    runs_in_graph = False

    def __init__(self, threat: ThreatModel, *, keep: str = "last", **kwargs) -> None:
        super().__init__(threat, keep=keep, **kwargs)
        if keep != "last":
            raise ValueError(
                f"cleverhans returns its last iterate; expected keep='last'; received keep={keep!r}"
            )
        self._compiled_logits: tuple[Any, Any] = (None, None)

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


@keras.saving.register_keras_serializable(package="he_keras")
class CleverhansFGSM(_CleverhansAttack):
    """`fast_gradient_method` of cleverhans: one step of length epsilon.

    Args:
        threat: the threat model.
        **kwargs: see `Attack`.
    """

    num_steps = 1
    #: The loss that is increased, as for `ProjectedGradient`.
    loss = "ce"
    _function = "fast_gradient_method"

    def __init__(self, threat: ThreatModel, name: str = "cleverhans:fgsm", **kwargs) -> None:
        super().__init__(threat, name=name, **kwargs)
        self._attack = _imported(self._function)

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
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
class CleverhansIterated(CleverhansFGSM):
    """One of the iterated gradient attacks of cleverhans.

    Args:
        threat: the threat model, linf or l2.
        attack: "bim", "pgd", "madry" or "mim".
        num_steps: number of steps.
        step_size: length of a step; default 2.5 * epsilon / num_steps, at most epsilon.
        random_start: of "pgd" and "madry": False starts at the image, True draws uniformly from the
            ball, a number is the radius of the start. Default: only "madry" starts at random.
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
        self._function, own = _ITERATED[attack]
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        self.attack = attack
        self.num_steps = int(num_steps)
        self.step_size = min(2.5 * threat.epsilon / num_steps, threat.epsilon)
        if step_size is not None:
            self.step_size = parse_epsilon(step_size)
        if not 0 < self.step_size <= threat.epsilon:
            raise ValueError(
                "cleverhans takes no step longer than epsilon; expected 0 < step_size <= "
                f"{threat.epsilon}; received step_size={step_size!r}"
            )
        for option, value in (("random_start", random_start), ("decay", decay)):
            if option != own and value is not None and value is not False:
                raise ValueError(
                    f"cleverhans's {attack} has no {option}; expected {option}=None; "
                    f"received {option}={value!r}"
                )
        start: Any = attack == "madry" if random_start is None else random_start
        start = checked_start(start, allows_gaussian=False)
        if attack == "madry" and start is False:
            raise ValueError(
                "cleverhans's madry starts at random; expected random_start=True or a radius; "
                f"received random_start={random_start!r}"
            )
        self.random_start = start
        if attack == "mim":
            decay = 1.0 if decay is None else decay
            check_number("decay", decay, 0.0)
        self.decay = decay

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"eps_iter": self.step_size, "nb_iter": self.num_steps}
        if self.decay is not None:
            settings["decay_factor"] = self.decay
        if self.attack == "pgd":
            settings["rand_init"] = self.random_start is not False
        if self.random_start is not False:
            radius = self.threat.epsilon if self.random_start is True else self.random_start
            settings["rand_minmax"] = radius
        return settings


@keras.saving.register_keras_serializable(package="he_keras")
class CleverhansCWL2(_CleverhansAttack):
    """`CarliniWagnerL2` of cleverhans, one image at a time: slow.

    Args:
        threat: the threat model, l2; epsilon only decides what counts as broken.
        num_steps: most steps for each value of the trade-off.
        binary_search_steps: values of the trade-off that are tried.
        initial_const: the first of them.
        learning_rate: of its Adam.
        stop_when_broken: has no influence: cleverhans searches to the end.
        **kwargs: see `Attack`.
    """

    norms = ("l2",)
    minimum_norm = True
    runs_inside_graphs = False

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 1000,
        binary_search_steps: int = 5,
        initial_const: float = 0.01,
        learning_rate: float = 0.005,
        stop_when_broken: bool = False,
        name: str = "cleverhans:cw-l2",
        **kwargs,
    ) -> None:
        super().__init__(threat, stop_when_broken=stop_when_broken, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("binary_search_steps", binary_search_steps)
        self.num_steps = int(num_steps)
        self.binary_search_steps = int(binary_search_steps)
        self.initial_const = positive_number("initial_const", initial_const)
        self.learning_rate = positive_number("learning_rate", learning_rate)
        self._attack = _imported("carlini_wagner_l2", "CarliniWagnerL2")

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        return 2 * self.num_steps * self.binary_search_steps + 1

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
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
    base, _, number = attack.lower().rpartition("-")
    if not number.isdigit():
        base = attack.lower()
    elif options.setdefault("num_steps", int(number)) != int(number):
        raise ValueError(
            "num_steps is given twice; expected it in the name or as an option; received "
            f"attack={attack!r} and num_steps={options['num_steps']!r}"
        )
    if base in _ITERATED:
        return CleverhansIterated(threat, base, **options)
    if base == "fgsm" and "num_steps" not in options:
        return CleverhansFGSM(threat, **options)
    if base == "cw-l2":
        return CleverhansCWL2(threat, **options)
    spsa = ' and "spsa-K" of this package (its own fails with Keras 3)' if base == "spsa" else ""
    raise ValueError(
        f"Unknown attack of cleverhans; expected one of {', '.join(ATTACKS)}, with -K for "
        f"num_steps (not fgsm){spsa}; received attack={attack!r}"
    )


def _imported(module: str, function: str | None = None):
    try:
        found = importlib.import_module(f"cleverhans.tf2.attacks.{module}")
    except ImportError as error:
        raise ValueError(
            "cleverhans is missing; expected `pip install cleverhans==4.0.0` to have been run; "
            f"received {error}"
        ) from error
    return getattr(found, function or module)
