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
    cosine="without bias",
    statistics=CIFAR_STATISTICS,
)
_FOLDER = "http://ml.cs.tsinghua.edu.cn/~xiaoyang/downloads/weights/"


def _entry(sizes: str, file: str, clean: float | None, robust: float | None) -> Entry:
    return Entry(
        name=f"at_he/wrn-{sizes}",
        file=f"{_FOLDER}{file}",
        network=f"wide_resnet_{sizes.replace('-', '_')}",
        licence="Apache-2.0",
        clean=clean,
        robust=robust,
        scale=10.0,
        margin=0.2,
    )


ENTRIES = (
    _entry("34-10", "model-wideres-pgdHE-wide10.pt", None, None),
    _entry("34-20", "model-wideres-pgdHE-wide20.pt", 85.14, 53.74),
)
