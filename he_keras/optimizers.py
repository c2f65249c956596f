"""SGD as the papers use it: PyTorch's momentum form with coupled weight decay.

The released codes of hypersphere embedding, TRADES, FastAT, FreeAT and RAT all train with
`torch.optim.SGD`. Two things set it apart from `keras.optimizers.SGD`, and both change results:

* Weight decay is coupled: `weight_decay * w` is added to the gradient and passes through the
  momentum. Keras's own `weight_decay` is decoupled: `w -= learning_rate * weight_decay * w` does
  not pass through the momentum, and so it is ten times weaker at momentum 0.9.
* The velocity gathers gradients, not steps, and is multiplied by the learning rate when it is used.
  So after a drop of the learning rate the old velocity shrinks with it at once. Keras stores
  `learning_rate * gradient` in the velocity, which carries the old rate on for about ten steps.

As in the papers, weight decay also acts on biases and on batch-norm scales and offsets;
`decay_exclude` names exceptions.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule


@keras.saving.register_keras_serializable(package="he_keras")
class SGD(keras.optimizers.Optimizer):
    """Stochastic gradient descent with `torch.optim.SGD`'s update.

    For each variable `w` with gradient `g`::

        g = g + weight_decay * w
        v = momentum * v + g                                  (v starts at 0)
        w = w - learning_rate * (g + momentum * v if nesterov else v)

    A variable without a gradient is left alone, decay included. Gradients are clipped before the
    decay is added. Under gradient accumulation decay and momentum act once per accumulated update.

    Args:
        learning_rate: A number, a `LearningRateSchedule`, or a callable without arguments.
        momentum: A number in [0, 1), or a `LearningRateSchedule` that is read at the same step as a
            scheduled learning rate (`he_keras.schedules.cyclic_momentum`, as FastAT uses it).
        weight_decay: Non-negative factor of the L2 term. `optimizer.coupled_weight_decay` holds it,
            because Keras takes the attribute `weight_decay` for the decoupled kind.
        nesterov: Whether to use Nesterov's momentum.
        decay_exclude: Regular expressions; a variable in whose path one of them is found is not
            decayed, e.g. `("bias", "gamma", "beta")`.
        name: Name of the optimizer.
        **kwargs: `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor` and `gradient_accumulation_steps` of
            `keras.optimizers.Optimizer`.

    Example:
        >>> import he_keras as he
        >>> import keras
        >>> weight = keras.Variable([1.0])
        >>> optimizer = he.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5)
        >>> optimizer.apply([keras.ops.ones(1)], [weight])  # 1 - 0.1 * (1 + 0.5 * 1)
        >>> float(weight[0])
        0.85...
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule | Callable[[], float] = 0.1,
        momentum: float | LearningRateSchedule = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decay_exclude: Sequence[str] = (),
        name: str = "sgd",
        **kwargs: Any,
    ):
        _check_momentum(momentum)
        if weight_decay is None or not weight_decay >= 0:
            raise ValueError(
                "Invalid weight decay; expected a number >= 0; "
                f"received weight_decay={weight_decay}"
            )
        if isinstance(learning_rate, int):
            learning_rate = float(learning_rate)
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.coupled_weight_decay = float(weight_decay)
        self.nesterov = nesterov
        self.decay_exclude = _checked_patterns(decay_exclude)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes more variables from weight decay; call it before the first step.

        Args:
            var_list: Variables of the model, which must be built.
            var_names: Regular expressions, as in `decay_exclude`.
        """
        if self.built:
            raise ValueError(
                "Too late to exclude variables from weight decay; expected an optimizer that is "
                f"not built; received built={self.built}"
            )
        exact_paths = [f"^{re.escape(variable.path)}$" for variable in var_list or ()]
        self.decay_exclude += _checked_patterns([*exact_paths, *(var_names or ())])

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the velocities and settles which variables are decayed."""
        if self.built:
            return
        super().build(variables)
        self.velocities = []
        if self.momentum != 0:
            self.velocities = self.add_optimizer_variables(variables, "velocity")
        self.is_decayed = [
            self.coupled_weight_decay > 0
            and not any(re.search(pattern, variable.path) for pattern in self.decay_exclude)
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable and its velocity."""
        # Keras's base class tells its subclasses to look the index up like this.
        index = self._get_variable_index(variable)
        # Weight decay changes every row, so that keeping a sparse gradient would save nothing.
        gradient = keras.ops.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if self.is_decayed[index]:
            gradient += self.coupled_weight_decay * tf.convert_to_tensor(variable)
        learning_rate = keras.ops.cast(learning_rate, variable.dtype)
        if not self.velocities:
            self.assign_sub(variable, learning_rate * gradient)
            return
        # One pass over weights and velocity instead of seven operations.
        tf.raw_ops.ResourceApplyMomentum(
            var=_handle(variable),
            accum=_handle(self.velocities[index]),
            lr=learning_rate,
            grad=gradient,
            momentum=keras.ops.cast(self._current_momentum(), variable.dtype),
            use_nesterov=self.nesterov,
        )

    def _current_momentum(self) -> Any:
        if not isinstance(self.momentum, LearningRateSchedule):
            return self.momentum
        # Keras reads a scheduled learning rate at the count of batches, while `iterations` counts
        # updates. This is the batch at which an accumulated update takes place.
        per_update = self.gradient_accumulation_steps or 1
        return self.momentum(self.iterations * per_update + (per_update - 1))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor as plain data."""
        momentum = self.momentum
        if isinstance(momentum, LearningRateSchedule):
            momentum = keras.optimizers.schedules.serialize(momentum)
        return super().get_config() | {
            "momentum": momentum,
            "weight_decay": self.coupled_weight_decay,
            "nesterov": self.nesterov,
            "decay_exclude": list(self.decay_exclude),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "SGD":
        """Rebuilds the optimizer, with its schedules, from `get_config()`."""
        config = dict(config)
        if isinstance(config["momentum"], dict):
            config["momentum"] = keras.optimizers.schedules.deserialize(
                config["momentum"], custom_objects=custom_objects
            )
        return super().from_config(config, custom_objects=custom_objects)


def _handle(variable):
    """The resource of a variable, under a strategy that of the replica which is being updated."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle


def _check_momentum(momentum: float | LearningRateSchedule) -> None:
    if not isinstance(momentum, LearningRateSchedule) and not 0 <= momentum < 1:
        raise ValueError(
            "Invalid momentum; expected a number in [0, 1) or a LearningRateSchedule; "
            f"received momentum={momentum}"
        )


def _checked_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the regular expressions as a tuple, after compiling each."""
    if isinstance(patterns, str):
        raise TypeError(
            "Invalid exclusion from weight decay; expected a sequence of regular expressions; "
            f"received decay_exclude={patterns!r}"
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Invalid exclusion from weight decay; expected regular expressions ({error}); "
                f"received decay_exclude={patterns!r}"
            ) from error
    return tuple(patterns)
