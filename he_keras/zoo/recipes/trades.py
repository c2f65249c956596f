"""TRADES (Zhang et al., 2019)."""

from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="trades",
    source="TRADES",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    ignored=WIDE_RESNET_IGNORED,
)
ENTRIES = (
    Entry(
        name="trades/wrn-34-10",
        file="drive:10sHvaXhTNZGz618QmD5gSOAjO3rMzV33",
        network="wide_resnet_34_10",
        licence="MIT",
        epsilon="0.031",
        clean=84.92,
        robust=53.08,
    ),
)
