"""What the checks before the attacks look at."""

from typing import NamedTuple

import numpy as np

from he_keras.attacks import Victim
from he_keras.threat import ThreatModel


class Subject(NamedTuple):
    """A classifier, and its answer to a sample.

    Attributes:
        victim: the classifier.
        images: checked images, in the threat model's bounds.
        labels: checked labels.
        logits: the classifier's answer to the images, in one batch.
        threat: the threat model.
    """

    victim: Victim
    images: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    threat: ThreatModel

    @property
    def correct(self) -> np.ndarray:
        """Mask of the images that are classified correctly."""
        return self.logits.argmax(axis=1) == self.labels

    @property
    def chance(self) -> float:
        """What always answering with the commonest class of the sample would score."""
        return float(np.bincount(self.labels).max() / len(self.labels))
