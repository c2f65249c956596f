"""FastAdv+: single-step training that recovers from a collapse by a few batches of PGD.

Paper: Li et al. 2020, "Towards understanding fast adversarial training". Training is FastAT's until
robust accuracy, watched by `callbacks.OverfittingGuard(on_collapse="recover")`, drops. The next
`recovery_batches` batches are trained on PGD examples, which brings robustness back without going
back to older weights. Then single steps follow again.

Deviations: the paper leaves the number of PGD steps to the reader. Here it is PGD-10 with Madry's
step from a uniform start. The adversary runs in inference mode, as in `FastAT`.
Cost per example: that of `FastAT`; in recovery K (forward + backward), then 1 forward + 1 full
backward.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_positive_integer
from he_keras.attacks.framework.victim import Victim
from he_keras.distribution import replicas
from he_keras.objectives.fast_at import FastAT
from he_keras.objectives.objective import Sizes, last_iterate, training_attack
from he_keras.objectives.registry import register
from he_keras.threat import ThreatModel


@register("fast_adv_plus")
@keras.saving.register_keras_serializable(package="he_keras")
class FastAdvPlus(FastAT):
    """Trains on single-step examples, and for some batches on PGD's after `start_recovery()`.

    Batch-norm statistics come from the same passes as `FastAT`'s; PGD never adds any.

    Args:
        threat: the threat model trained against.
        recovery_batches: batches of PGD training after a collapse (the paper's 20).
        recovery_steps: steps of PGD in recovery.
        **kwargs: the single-step adversary's settings, see `FastAT`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.fast_adv_plus import FastAdvPlus
        >>> FastAdvPlus(he.ThreatModel("linf", "12/255")).recovery_batches
        20
    """

    threat: ThreatModel

    def __init__(
        self, threat, recovery_batches: int = 20, recovery_steps: int = 10, **kwargs
    ) -> None:
        super().__init__(threat, **kwargs)
        check_positive_integer("recovery_batches", recovery_batches)
        check_positive_integer("recovery_steps", recovery_steps)
        self.recovery_batches = recovery_batches
        self.recovery_steps = recovery_steps
        self.recovery_attack = training_attack(
            threat, recovery_steps, 2.5 * threat.epsilon / recovery_steps, random_start=True
        )
        self._remaining: tf.Variable | None = None

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the count of PGD batches."""
        if self._remaining is None:
            self._remaining = replicas.own_variable(0, "recovery_batches")

    def start_recovery(self) -> None:
        """Trains the next `recovery_batches` batches on PGD examples."""
        for each in self._copies():
            each.assign(self.recovery_batches)

    def remaining_batches(self) -> int:
        """Batches of PGD training that are still to come."""
        return max(int(each.numpy()) for each in self._copies())

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """One step, or PGD while recovering."""
        single_step = super().craft
        return tf.cond(
            self._count().read_value() > 0,
            lambda: self._recovery_images(model, images, labels, seed, step_number),
            lambda: single_step(model, images, labels, seed, step_number),
        )

    def recovery_sizes_at(self, step_number=None) -> Sizes:
        """Sizes of PGD: its steps follow the radius; a scheduled step size is the single step's."""
        sizes = self.sizes_at(step_number)
        if sizes.scheduled_step_size is None:
            return sizes
        return Sizes(sizes.threat, sizes.threat.epsilon / self.threat.epsilon)

    def _recovery_images(self, model, images, labels, seed, step_number):
        victim, sizes = Victim(model), self.recovery_sizes_at(step_number)
        return last_iterate(self.recovery_attack, victim, images, labels, seed, sizes)

    def after_update(self, images, x_adv, gradient, step) -> None:
        """Counts the batch."""
        count = self._count()
        count.assign(tf.maximum(count.read_value() - 1, 0))

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The batches of PGD still to come."""
        return {} if self._remaining is None else {"recovery": self._copies()[0].numpy()}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        if self._remaining is not None:
            for each in self._copies():
                each.assign(int(arrays["recovery"]))

    def _count(self) -> tf.Variable:
        if self._remaining is None:
            raise ValueError(
                "The objective has no count of batches yet; expected a model that was built; "
                "received an objective before build(image_shape)"
            )
        return self._remaining

    def _copies(self) -> tuple:
        return replicas.copies(self._count())
