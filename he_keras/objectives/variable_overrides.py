"""Other values of variables for a part of a training step, without assigning them."""

import keras


class VariableOverrides(keras.StatelessScope):
    """A scope in which Keras variables have other values; no variable changes.

    `get_current_value` returns what layers would have assigned inside, such as moving statistics.
    In contrast to Keras's own class this one may be nested: values that it does not override are
    those of the scope around it.

    Args:
        state_mapping: pairs of a Keras variable and its value.

    Example:
        >>> import keras
        >>> from he_keras.objectives.variable_overrides import VariableOverrides
        >>> variable, other = keras.Variable(1.0), keras.Variable(2.0)
        >>> with VariableOverrides([(variable, 5.0)]):
        ...     with VariableOverrides([(other, 7.0)]):
        ...         inside = float(variable + other)
        >>> inside, float(variable + other)
        (12.0, 3.0)
    """

    def __init__(self, state_mapping=()) -> None:
        super().__init__(list(state_mapping), collect_losses=True, initialize_variables=False)
        self.original_scope: keras.StatelessScope | None = None

    def get_current_value(self, variable):
        """Returns the variable's value inside this scope, or None for the variable's own."""
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value

    def keep_updates(self, model) -> None:
        """Assigns to a model's variables what its layers updated inside: statistics, seeds."""
        for variable in model.non_trainable_variables:
            value = self.get_current_value(variable)
            if value is not None:
                variable.assign(value)
