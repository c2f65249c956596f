"""RobustBench's `BoostingWideResNet`: the HE paper's model; a file may have mean and deviation."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import ROBUSTBENCH_STATISTICS, WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="robustbench/boosting",
    source="RobustBench, class BoostingWideResNet",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    ignored=WIDE_RESNET_IGNORED,
    cosine="always",
    statistics=CIFAR_STATISTICS,
    stored_statistics=ROBUSTBENCH_STATISTICS,
)
ENTRIES = (
    Entry(
        name="robustbench/boosting/Pang2020Boosting",
        file="drive:1iNWOj3MP7kGe8yTAS4XnDaDXDLt0mwqw",
        network="wide_resnet_34_20",
        licence="Apache-2.0",
        clean=85.14,
        robust=53.74,
        scale=10.0,
        margin=0.2,
    ),
)
