"""RobustBench's post-activation ResNets for CIFAR, and torchvision's for ImageNet."""

from he_keras.networks.network import IMAGENET_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import RESNET

RECIPE = Recipe(
    name="robustbench/resnet",
    source="RobustBench, class ResNet, and torchvision",
    network="resnet",
    layers=RESNET,
    head=("linear", "fc"),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    ignored=("*.num_batches_tracked", "normalize.*"),
)
_IMAGENET = {"statistics": IMAGENET_STATISTICS, "input_shape": (224, 224, 3)}


def _imagenet(name: str, network: str, clean: float | None, robust: float) -> Entry:
    return Entry(
        name=f"robustbench/resnet/{name}",
        file=f"RobustBench's model {name} for ImageNet",
        network=network,
        licence="MIT",
        data="imagenet2012",
        epsilon="4/255",
        clean=clean,
        robust=robust,
        changes=_IMAGENET,
    )


ENTRIES = (
    Entry(
        name="robustbench/resnet/Sehwag2021Proxy_R18",
        file="RobustBench's model Sehwag2021Proxy_R18",
        network="resnet_18",
        licence="MIT",
        clean=84.59,
        robust=55.54,
    ),
    Entry(
        name="robustbench/resnet/Addepalli2021Towards_RN18",
        file="RobustBench's model Addepalli2021Towards_RN18",
        network="resnet_18",
        licence="MIT",
        clean=80.24,
        robust=51.06,
    ),
    _imagenet("Salman2020Do_R18", "resnet_18", None, 25.32),
    _imagenet("Salman2020Do_R50", "resnet_50", None, 34.96),
    _imagenet("Salman2020Do_50_2", "wide_resnet_50_2", None, 38.14),
    _imagenet("Engstrom2019Robustness", "resnet_50", 62.56, 29.22),
)
