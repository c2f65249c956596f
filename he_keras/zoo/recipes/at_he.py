"""The HE paper's own checkpoints (Pang et al., 2020)."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="at_he",
    source="AT_HE, the code of the HE paper",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    containers=("state_dict",),
    ignored=WIDE_RESNET_IGNORED,
    cosine=True,
    statistics=CIFAR_STATISTICS,
)
_FOLDER = "http://ml.cs.tsinghua.edu.cn/~xiaoyang/downloads/weights/"
ENTRIES = (
    Entry(
        name="at_he/wrn-34-10",
        file=f"{_FOLDER}model-wideres-pgdHE-wide10.pt",
        network="wide_resnet_34_10",
        licence="Apache-2.0",
        scale=10.0,
        margin=0.2,
    ),
    Entry(
        name="at_he/wrn-34-20",
        file=f"{_FOLDER}model-wideres-pgdHE-wide20.pt",
        network="wide_resnet_34_20",
        licence="Apache-2.0",
        clean=85.14,
        robust=53.74,
        scale=10.0,
        margin=0.2,
    ),
)
