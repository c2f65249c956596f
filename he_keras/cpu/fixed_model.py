"""A classifier in inference mode whose variables were read once."""

from collections.abc import Callable
from typing import NamedTuple

from he_keras.layers.call_context import call_context


class FixedModel(NamedTuple):
    """The parts of a classifier in inference mode, for many passes while its variables stand still.

    Attributes:
        features: function from images to feature vectors.
        logits_of_features: function from feature vectors to scaled logits.
    """

    features: Callable
    logits_of_features: Callable

    def __call__(self, images):
        """Returns scaled logits."""
        with call_context(training=False):
            return self.logits_of_features(self.features(images))
