"""From a configuration to a trained and evaluated model."""

from he_keras.experiment.configuration import (
    build_head,
    build_model,
    build_objective,
    build_optimizer,
    build_threat,
    default_config,
    smoke_variant,
    to_plain,
)
from he_keras.experiment.training import (
    Interrupted,
    Training,
    load_datasets,
    prepare_training,
    run_training,
)

__all__ = [
    "Interrupted",
    "Training",
    "build_head",
    "build_model",
    "build_objective",
    "build_optimizer",
    "build_threat",
    "default_config",
    "load_datasets",
    "prepare_training",
    "run_training",
    "smoke_variant",
    "to_plain",
]
