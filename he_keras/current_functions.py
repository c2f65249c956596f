"""A model whose compiled functions follow the settings of its layers.

Keras compiles the steps of `fit`, `evaluate` and `predict` once. A setting that is changed later,
such as the scale of a head, would have no effect, without a word.
"""

import types
import warnings

import tensorflow as tf

from he_keras.attacks.framework.agreement import configuration
from he_keras.distribution import keras_repairs


class CurrentFunctions(keras_repairs.Repaired):
    """Base class of models that compile a step anew where a setting of a layer has changed."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        # In a holder, because Keras would wrap what it finds in an attribute.
        self._compiled_for = types.SimpleNamespace(train=None, test=None, predict=None, tried=None)

    def check_values(self) -> None:
        """Called before a step is compiled, once for each set of settings. Here nothing happens."""

    def check_trainable(self) -> None:
        """Called before the step of `fit` is compiled. Here nothing happens."""

    def make_train_function(self, force: bool = False):
        """Makes the function that `fit` and `train_on_batch` call."""
        force = self._is_outdated("train") or force
        if force or self.train_function is None:
            self.check_trainable()
        return super().make_train_function(force=force)

    def make_test_function(self, force: bool = False):
        """Makes the function that `evaluate` and `test_on_batch` call."""
        return super().make_test_function(force=self._is_outdated("test") or force)

    def make_predict_function(self, force: bool = False):
        """Makes the function that `predict` and `predict_on_batch` call."""
        return super().make_predict_function(force=self._is_outdated("predict") or force)

    def predict_step(self, data):
        """Returns the logits, as `keras.Model` does."""
        return self.compiled_with_current_settings("predict", super().predict_step(data))

    def compiled_with_current_settings(self, name: str, results):
        """Returns a step's results; notes the settings that its compilation has met."""
        if not tf.executing_eagerly():
            setattr(self._compiled_for, name, configuration(self))
        return results

    def fit(self, *args, **options):
        """Trains as `keras.Model.fit` does; warns of settings that were changed on the way."""
        history = super().fit(*args, **options)
        if not self.run_eagerly and self._compiled_for.train != configuration(self):
            warnings.warn(
                "A setting of a layer changed while fit() ran; expected the same from the first "
                "batch to the last: fit() compiles what it finds, so change it between two calls; "
                "received a model that was trained with the old setting",
                RuntimeWarning,
                stacklevel=3,
            )
        return history

    def _is_outdated(self, name: str) -> bool:
        """Whether a function was compiled for other settings than those of now."""
        settings = configuration(self)
        if self.built and settings != self._compiled_for.tried:
            self.check_values()
            self._compiled_for.tried = settings
        return settings != getattr(self._compiled_for, name)
