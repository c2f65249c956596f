"""Fast is better than free (Wong et al., 2020), whose data loader standardises the images."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import PREACT_RESNET

RECIPE = Recipe(
    name="fast_adversarial",
    source="Fast is better than free, the authors' code",
    network="preact-resnet",
    layers=PREACT_RESNET,
    head=("linear",),
    statistics=CIFAR_STATISTICS,
    options={"shortcut": "input"},
)
ENTRIES = (
    Entry(
        name="fast_adversarial/preact-resnet-18",
        file="https://drive.google.com/open?id=1W2zGHyxTPgHhWln1kpHK5h-HY9kwfKfl",
        network="preact_resnet_18",
        licence="not stated",
        clean=86.06,
    ),
)
