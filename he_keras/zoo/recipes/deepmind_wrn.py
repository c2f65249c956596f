"""DeepMind's WideResNets in PyTorch (Gowal, Rebuffi and others), and Wang et al.'s of that form."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import DEEPMIND_OPTIONS

LAYERS = {
    "init_conv": "stem_conv",
    "layer.{stage-}.block.{block-}.batchnorm_{n-}": "stage{stage}_block{block}_{n}_bn",
    "layer.{stage-}.block.{block-}.conv_{n-}": "stage{stage}_block{block}_{n}_conv",
    "layer.{stage-}.block.{block-}.shortcut": "stage{stage}_block{block}_shortcut_conv",
    "batchnorm": "final_bn",
}
FOLDER = "https://storage.googleapis.com/dm-adversarial-robustness/"
CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
#: The images get a black border of two pixels.
MNIST = {
    "statistics": ((0.5,), (0.5,)),
    "input_shape": (28, 28, 1),
    "options": {"border": 2},
}

RECIPE = Recipe(
    name="deepmind/wrn",
    source="DeepMind, class WideResNet",
    network="wide-resnet",
    layers=LAYERS,
    head=("logits",),
    statistics=CIFAR_STATISTICS,
    options=DEEPMIND_OPTIONS,
)


def _entry(name: str, sizes: str, clean: float, robust: float, **fields) -> Entry:
    return Entry(
        name=f"deepmind/wrn/{name}",
        file=f"{FOLDER}{name}.pt",
        network=f"wide_resnet_{sizes}",
        licence="Apache-2.0",
        clean=clean,
        robust=robust,
        **fields,
    )


def _robustbench(name: str, sizes: str, key: str, clean: float, robust: float) -> Entry:
    return Entry(
        name=f"deepmind/wrn/{name}",
        file=f"drive:{key}",
        network=f"wide_resnet_{sizes}",
        licence="MIT",
        clean=clean,
        robust=robust,
    )


_L2 = {"norm": "l2", "epsilon": "0.5"}
_CIFAR100 = {"data": "cifar100", "changes": {"statistics": CIFAR100_STATISTICS}}
_MNIST_ENTRY = {"data": "mnist", "epsilon": "0.3", "changes": MNIST}
ENTRIES = (
    _entry("cifar10_linf_wrn28-10_with", "28_10", 89.48, 62.80),
    _entry("cifar10_linf_wrn70-16_with", "70_16", 91.10, 65.88),
    _entry("cifar10_linf_wrn70-16_without", "70_16", 85.29, 57.20),
    _entry("cifar10_linf_wrn34-20_without", "34_20", 85.64, 56.86),
    _entry("cifar10_linf_wrn28-10_cutmix_ddpm_v2", "28_10", 87.33, 60.75),
    _entry("cifar10_linf_wrn70-16_cutmix_ddpm_v2", "70_16", 88.54, 64.25),
    _entry("cifar10_linf_wrn106-16_cutmix_ddpm_v2", "106_16", 88.50, 64.64),
    _entry("cifar10_linf_wrn28-10_ddpm_100m", "28_10", 87.50, 63.44),
    _entry("cifar10_linf_wrn70-16_cutmix_ddpm_100m", "70_16", 88.74, 66.11),
    _entry("cifar10_l2_wrn70-16_without", "70_16", 90.90, 74.50, **_L2),
    _entry("cifar10_l2_wrn70-16_with", "70_16", 94.74, 80.53, **_L2),
    _entry("cifar10_l2_wrn28-10_cutmix_ddpm_v2", "28_10", 91.79, 78.80, **_L2),
    _entry("cifar10_l2_wrn70-16_cutmix_ddpm_v2", "70_16", 92.41, 80.42, **_L2),
    _entry("cifar100_linf_wrn70-16_without", "70_16", 60.86, 30.03, **_CIFAR100),
    _entry("cifar100_linf_wrn70-16_with", "70_16", 69.15, 36.88, **_CIFAR100),
    _entry("cifar100_linf_wrn28-10_cutmix_ddpm", "28_10", 62.41, 32.06, **_CIFAR100),
    _entry("cifar100_linf_wrn70-16_cutmix_ddpm", "70_16", 63.56, 34.64, **_CIFAR100),
    _entry("mnist_linf_wrn28-10_without", "28_10", 99.26, 96.34, **_MNIST_ENTRY),
    _robustbench("Rade2021Helper_ddpm", "28_10", "1AOF6LxnwgS5fCz_lVLYqs_wnUYuv6O7z", 88.16, 60.97),
    _robustbench(
        "Rade2021Helper_extra", "34_10", "1GhAp-0C3ONRy9BxIe0J9vKc082vHvR7t", 91.47, 62.83
    ),
    _robustbench(
        "Wang2023Better_WRN-28-10", "28_10", "1-6MYKJdECDVGaWjj6GgqvaT95BGKhUvI", 92.44, 67.31
    ),
    _robustbench(
        "Wang2023Better_WRN-70-16", "70_16", "1-RF7ZSS-PAh6bfQcuqx4lh9bc9BUGnap", 93.25, 70.69
    ),
)
