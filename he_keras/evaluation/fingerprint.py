"""What decides the verdicts of an evaluation, as plain data."""

import hashlib

import numpy as np

from he_keras.evaluation.examples import Clean
from he_keras.threat import ThreatModel
from he_keras.version import __version__


def settings_of(
    model, clean: Clean, attacks, threat: ThreatModel, mode: str, batch_size: int
) -> dict:
    """Returns the settings of an evaluation, with digests of the data and of the model."""
    return {
        "attacks": [attack.get_config() for attack in attacks],
        "batch_size": batch_size,
        "data": clean.digest,
        "mode": mode,
        "model": model_digest(model) or _digest_of([clean.scored.prediction]),
        "num_examples": len(clean.labels),
        "threat": threat.get_config(),
        "he_keras": __version__,
    }


def model_digest(model) -> str | None:
    """Returns a digest of a model's weights and statistics; None for a function without any."""
    # A function has no such attribute, a model of another library perhaps the second one.
    variables = getattr(model, "weights", None) or getattr(model, "variables", None)
    if not variables or callable(variables):
        return None
    return _digest_of([np.asarray(variable) for variable in variables])


def _digest_of(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
