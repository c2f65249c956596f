"""RobustBench's post-activation ResNets for CIFAR, and torchvision's for ImageNet."""

from he_keras.networks.network import IMAGENET_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import RESNET, ROBUSTBENCH_STATISTICS

RECIPE = Recipe(
    name="robustbench/resnet",
    source="RobustBench, class ResNet, and torchvision",
    network="resnet",
    layers=RESNET,
    head=("linear", "fc"),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    stored_statistics=(*ROBUSTBENCH_STATISTICS, ("normalize.mean", "normalize.std")),
)
#: Of the files that MadryLab trained on CIFAR-10, and RobustBench packed anew.
_ENGSTROM = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_IMAGENET = {
    "data": "imagenet2012",
    "epsilon": "4/255",
    "changes": {"statistics": IMAGENET_STATISTICS, "input_shape": (224, 224, 3)},
}
_L2 = {"norm": "l2", "epsilon": "0.5"}


def _entry(name: str, network: str, key: str, clean: float, robust: float, **fields) -> Entry:
    return Entry(
        name=f"robustbench/resnet/{name}",
        file=f"drive:{key}",
        network=network,
        licence="MIT",
        clean=clean,
        robust=robust,
        **fields,
    )


ENTRIES = (
    _entry("Sehwag2021Proxy_R18", "resnet_18", "1-ZgoSlD_AMhtXdnUElilxVXnzK2DcHuu", 84.59, 55.54),
    _entry(
        "Addepalli2021Towards_RN18", "resnet_18", "1-1DxecXz5U_xZ54DVdE-GVm71Tiox-Ri", 80.24, 51.06
    ),
    _entry(
        "Engstrom2019Robustness",
        "resnet_50",
        "1etqmQsksNIWBvBQ4r8ZFk_3FJlLWr8Rr",
        87.03,
        49.25,
        changes={"statistics": _ENGSTROM},
    ),
    _entry(
        "Engstrom2019Robustness-l2",
        "resnet_50",
        "1O8rGa6xOUIRwQ-M4ESrCjzknby8TM2ZE",
        90.83,
        69.24,
        changes={"statistics": _ENGSTROM},
        **_L2,
    ),
    _entry(
        "Salman2020Do_R18",
        "resnet_18",
        "1OThCOQCOxY6lAgxZxgiK3YuZDD7PPfPx",
        52.92,
        25.32,
        **_IMAGENET,
    ),
    _entry(
        "Salman2020Do_R50",
        "resnet_50",
        "1TmT5oGa1UvVjM3d-XeSj_XmKqBNRUg8r",
        64.02,
        34.96,
        **_IMAGENET,
    ),
    _entry(
        "Salman2020Do_50_2",
        "wide_resnet_50_2",
        "1OT7xaQYljrTr3vGbM37xK9SPoPJvbSKB",
        68.46,
        38.14,
        **_IMAGENET,
    ),
    _entry(
        "Engstrom2019Robustness-imagenet",
        "resnet_50",
        "1T2Fvi1eCJTeAOEzrH_4TAIwO8HTOYVyn",
        62.56,
        29.22,
        **_IMAGENET,
    ),
)
