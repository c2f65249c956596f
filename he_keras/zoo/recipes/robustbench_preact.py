"""RobustBench's `PreActResNet`. The shortcut differs between files, so the entry names it."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import PREACT_RESNET

RECIPE = Recipe(
    name="robustbench/preact",
    source="RobustBench, class PreActResNet",
    network="preact-resnet",
    layers=PREACT_RESNET,
    head=("linear",),
    containers=("state_dict", "last"),
    prefixes=("module.", "model."),
    statistics=CIFAR_STATISTICS,
)
ENTRIES = (
    Entry(
        name="robustbench/preact/Wong2020Fast",
        file="drive:1Re--_lf3jCEw9bnQqGkjw3J7v2tSZKrv",
        network="preact_resnet_18",
        licence="MIT",
        clean=83.34,
        robust=43.21,
        changes={"options": {"shortcut": "input"}},
    ),
    Entry(
        name="robustbench/preact/Rice2020Overfitting-l2",
        file="drive:1jo-31utiYNBVzLM0NxUEWz0teo3Z0xa7",
        network="preact_resnet_18",
        licence="MIT",
        norm="l2",
        epsilon="0.5",
        clean=88.67,
        robust=67.68,
    ),
    Entry(
        name="robustbench/preact/Andriushchenko2020Understanding",
        file="drive:1Uyvprd98bIyxfMjLdCZwm-NEJ-6GMVis",
        network="preact_resnet_18",
        licence="MIT",
        clean=79.84,
        robust=43.93,
        changes={"statistics": False, "options": {"shortcut": "input"}},
    ),
)
