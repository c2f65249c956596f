"""FastAdv+: single-step training that recovers from a collapse by a few batches of PGD.

Paper: Li et al. 2020, "Towards understanding fast adversarial training". Training is FastAT's until
robust accuracy, watched by `callbacks.OverfittingGuard(on_collapse="recover")`, drops; the next
`recovery_batches` batches are trained on PGD examples, which brings robustness back without going
back to older weights; then single steps again.

Deviations: the paper leaves the number of PGD steps to the reader; here PGD-10 with Madry's step
from a uniform start. The adversary runs in inference mode, as in `FastAT`.
Cost per example: as `FastAT`; in recovery K (forward + backward), then 1 forward + 1 full backward.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks.checks import check_positive_integer
from he_keras.attacks.victim import Victim
from he_keras.objectives.fast_at import FastAT
from he_keras.objectives.objective import training_attack
from he_keras.objectives.registry import register


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

    def __init__(
        self, threat, recovery_batches: int = 20, recovery_steps: int = 10, **kwargs
    ) -> None:
        super().__init__(threat, **kwargs)
        check_positive_integer("recovery_batches", recovery_batches)
        check_positive_integer("recovery_steps", recovery_steps)
        self.recovery_batches = recovery_batches
        self.recovery_attack = training_attack(
            threat, recovery_steps, 2.5 * threat.epsilon / recovery_steps, random_start=True
        )
        self._remaining: tf.Variable | None = None

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the perturbation buffer where one is needed, and the count of PGD batches."""
        super().build(image_shape)
        if self._remaining is None:
            # Outside any graph, where a model that builds itself in its first step would put it.
            with tf.init_scope():
                self._remaining = tf.Variable(
                    0,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                    name="recovery_batches",
                )

    def start_recovery(self) -> None:
        """Trains the next `recovery_batches` batches on PGD examples."""
        for each in self._copies():
            each.assign(self.recovery_batches)

    def remaining_batches(self) -> int:
        """Batches of PGD training that are still to come."""
        return max(int(each.numpy()) for each in self._copies())

    def craft(self, model, images, labels, seed=(0, 0)):
        """One step, or PGD while recovering."""
        single_step = super().craft
        return tf.cond(
            self._count().read_value() > 0,
            lambda: self.recovery_attack.perturb(Victim(model, streams=None), images, labels, seed),
            lambda: single_step(model, images, labels, seed),
        )

    def train_step(self, model, images, labels, sample_weight):
        """Trains on the batch and counts it."""
        training_pass = super().train_step(model, images, labels, sample_weight)
        count = self._count()
        count.assign(tf.maximum(count.read_value() - 1, 0))
        return training_pass

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The perturbation buffer, where there is one, and the batches of PGD still to come."""
        counted = {} if self._remaining is None else {"recovery": self._copies()[0].numpy()}
        return {**super().state_arrays(), **counted}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `state_arrays` returned."""
        super().load_state_arrays(arrays)
        if self._remaining is not None:
            for each in self._copies():
                each.assign(int(arrays["recovery"]))

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "recovery_batches": self.recovery_batches,
            "recovery_steps": self.recovery_attack.num_steps,
        }

    def _count(self) -> tf.Variable:
        if self._remaining is None:
            raise ValueError(
                "The objective has no count of batches yet; expected a model that was built; "
                "received an objective before build(image_shape)"
            )
        return self._remaining

    def _copies(self) -> tuple:
        return tf.distribute.get_strategy().experimental_local_results(self._count())
