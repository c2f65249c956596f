"""From a configuration to a trained and evaluated model."""

from he_keras.experiment.configuration import (
    build_attacks,
    build_head,
    build_model,
    build_objective,
    build_optimizer,
    build_threat,
    check_config,
    default_config,
    read_config,
    smoke_variant,
    to_plain,
)
from he_keras.experiment.dry_run import cost_of_search, cost_of_training
from he_keras.experiment.searching import Search, prepare_search, run_search, with_values
from he_keras.experiment.training import (
    Interrupted,
    Training,
    load_datasets,
    load_split,
    prepare_training,
    run_training,
)

__all__ = [
    "Interrupted",
    "Search",
    "Training",
    "build_attacks",
    "build_head",
    "build_model",
    "build_objective",
    "build_optimizer",
    "build_threat",
    "check_config",
    "cost_of_search",
    "cost_of_training",
    "default_config",
    "load_datasets",
    "load_split",
    "prepare_search",
    "prepare_training",
    "read_config",
    "run_search",
    "run_training",
    "smoke_variant",
    "to_plain",
    "with_values",
]
