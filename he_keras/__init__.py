"""he_keras: hypersphere-embedding adversarial training, honestly evaluated, on Keras 3."""

from he_keras.native_messages import hidden as _hidden

with _hidden():
    import keras as _keras

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        "he_keras runs on the TensorFlow backend of Keras; expected KERAS_BACKEND=tensorflow; "
        f"received {_keras.backend.backend()!r}"
    )

from he_keras import (
    analysis,
    attacks,
    callbacks,
    cpu,
    data,
    distribution,
    evaluation,
    experiment,
    export,
    layers,
    losses,
    networks,
    objectives,
    optimizers,
    schedules,
    search,
    serving,
    zoo,
)
from he_keras.adversarial_model import HEAdversarialModel, load_model
from he_keras.classifiers import wrap_classifier
from he_keras.evaluation import evaluate_robustness
from he_keras.export import export_saved_model
from he_keras.layers import CosineHead, FeatureNorm
from he_keras.model_files import load_classifier
from he_keras.snapshot_ensemble import SnapshotEnsemble
from he_keras.threat import ThreatModel
from he_keras.version import __version__

__all__ = [
    "CosineHead",
    "FeatureNorm",
    "HEAdversarialModel",
    "SnapshotEnsemble",
    "ThreatModel",
    "__version__",
    "analysis",
    "attacks",
    "callbacks",
    "cpu",
    "data",
    "distribution",
    "evaluate_robustness",
    "evaluation",
    "experiment",
    "export",
    "export_saved_model",
    "layers",
    "load_classifier",
    "load_model",
    "losses",
    "networks",
    "objectives",
    "optimizers",
    "schedules",
    "search",
    "serving",
    "wrap_classifier",
    "zoo",
]
