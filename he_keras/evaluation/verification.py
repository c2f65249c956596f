"""Scores the recorded adversarial images of an evaluation once more, with a model loaded anew."""

import dataclasses
import json
import pathlib

import numpy as np

from he_keras.evaluation.examples import Examples
from he_keras.evaluation.journal import FOLDER, read_batch
from he_keras.evaluation.scoring import Scorer
from he_keras.threat import ThreatModel

# Images are stored in single precision.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Verification:
    """What scoring once more showed.

    Attributes:
        num_images: recorded adversarial images.
        num_held: of them, those that the model classifies correctly now.
        num_outside: of them, those outside the ball around their image, or the bounds.
        max_distance: of all, in the threat model's norm.
    """

    num_images: int
    num_held: int
    num_outside: int
    max_distance: float

    @property
    def holds(self) -> bool:
        """Every recorded verdict is the verdict now."""
        return self.num_held == self.num_outside == 0

    def summary(self) -> str:
        """Returns the result as a sentence."""
        verdict = "hold" if self.holds else "DO NOT HOLD"
        return (
            f"The recorded verdicts {verdict}: of {self.num_images} adversarial images "
            f"{self.num_held} are classified correctly now, {self.num_outside} lie outside the "
            f"threat model (largest distance {self.max_distance:.6g})."
        )


def verify(model, examples, folder, batch_size: int = 250) -> Verification:
    """Scores every adversarial image that an evaluation has recorded in `folder`.

    Args:
        model: the model of the evaluation.
        examples: the data of the evaluation.
        folder: its `output_dir`.
        batch_size: examples per batch of the data that are read.

    Example:
        >>> import tempfile, he_keras as he, numpy as np, tensorflow as tf
        >>> logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])
        >>> data = np.array([[0.55, 0.5]], "float32"), np.array([0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = he.evaluate_robustness(
        ...         logits, data, he.ThreatModel("linf", 0.1), ["fgsm"], folder, checks=False)
        ...     he.evaluation.verify(logits, data, folder).num_images
        1
    """
    folder = pathlib.Path(folder)
    threat = _recorded_threat(folder)
    images = np.concatenate([part for part, _ in Examples(threat, examples, batch_size)])
    scorer = Scorer(model)
    num_images = num_held = num_outside = 0
    max_distance = 0.0
    low, high = threat.bounds
    for path in sorted((folder / FOLDER).glob("block-*/*.npz")):
        batch = read_batch(path)
        positions, x_adv = batch.positions[batch.broken], batch.x_adv
        if not len(positions):
            continue
        scored = scorer(x_adv, batch.labels[batch.broken])
        distance = np.asarray(threat.distance(x_adv, images[positions].astype(x_adv.dtype)))
        flat = x_adv.reshape(len(x_adv), -1)
        inside = (flat.min(axis=1) >= low - _ROUNDING) & (flat.max(axis=1) <= high + _ROUNDING)
        num_images += len(positions)
        num_held += int((~scored.wrong).sum())
        num_outside += int((~inside | (distance > threat.epsilon * (1 + 1e-5) + _ROUNDING)).sum())
        max_distance = max(max_distance, float(distance.max()))
    return Verification(num_images, num_held, num_outside, max_distance)


def _recorded_threat(folder: pathlib.Path) -> ThreatModel:
    path = folder / FOLDER / "settings.json"
    try:
        return ThreatModel.from_config(json.loads(path.read_text())["threat"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"Not the folder of an evaluation; expected {path}; received {error}"
        ) from error
