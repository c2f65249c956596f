"""RobustBench's `WideResNet`: names as in TRADES, and a standardisation that the entry names."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="robustbench/wrn",
    source="RobustBench, class WideResNet",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    ignored=(*WIDE_RESNET_IGNORED, "mu", "sigma"),
)
#: Hendrycks et al. map images to [-1, 1].
_TWICE_MINUS_ONE = ((0.5,) * 3, (0.5,) * 3)
ENTRIES = (
    Entry(
        name="robustbench/wrn/Carmon2019Unlabeled",
        file="drive:15tUx-gkZMYx7BfEOw1GY5OKC-jECIsPQ",
        network="wide_resnet_28_10",
        licence="MIT",
        clean=89.69,
        robust=59.53,
    ),
    Entry(
        name="robustbench/wrn/Zhang2019Theoretically",
        file="drive:1hPz9QQwyM7QSuWu-ANG_uXR-29xtL8t_",
        network="wide_resnet_34_10",
        licence="MIT",
        epsilon="0.031",
        clean=84.92,
        robust=53.08,
    ),
    Entry(
        name="robustbench/wrn/Rice2020Overfitting",
        file="drive:1vC_Twazji7lBjeMQvAD9uEQxi9Nx2oG-",
        network="wide_resnet_34_20",
        licence="MIT",
        clean=85.34,
        robust=53.42,
        changes={"statistics": CIFAR_STATISTICS},
    ),
    Entry(
        name="robustbench/wrn/Hendrycks2019Using",
        file="drive:1-DcJsYw2dNEOyF9epks2QS7r9nqBDEsw",
        network="wide_resnet_28_10",
        licence="Apache-2.0",
        clean=87.11,
        robust=54.92,
        changes={"statistics": _TWICE_MINUS_ONE},
    ),
)
