"""RobustBench's `BoostingWideResNet`: the HE paper's model, with mean and deviation in the file."""

from he_keras.zoo.recipe import Recipe
from he_keras.zoo.recipes.layer_maps import WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="robustbench/boosting",
    source="RobustBench, class BoostingWideResNet",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    ignored=WIDE_RESNET_IGNORED,
    cosine=True,
    statistics=("mu", "sigma"),
)
ENTRIES = ()
