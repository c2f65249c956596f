"""DeepMind's PreActResNet-18 (Rebuffi, Rade and others): a 3x3 convolution as shortcut."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.deepmind_wrn import FOLDER
from he_keras.zoo.recipes.layer_maps import DEEPMIND_OPTIONS

RECIPE = Recipe(
    name="deepmind/preact",
    source="DeepMind, class PreActResNet",
    network="preact-resnet",
    layers={
        "conv_2d": "stem_conv",
        "layer_{stage-}.{block-}.batchnorm_{n-}": "stage{stage}_block{block}_{n}_bn",
        "layer_{stage-}.{block-}.conv_2d_{n}": "stage{stage}_block{block}_{n}_conv",
        "layer_{stage-}.{block-}.shortcut": "stage{stage}_block{block}_shortcut_conv",
        "batchnorm": "final_bn",
    },
    head=("logits",),
    statistics=CIFAR_STATISTICS,
    options={**DEEPMIND_OPTIONS, "shortcut": "input-3x3"},
)


def _entry(name: str, file: str, licence: str, clean: float, robust: float) -> Entry:
    return Entry(
        name=f"deepmind/preact/{name}",
        file=file,
        network="preact_resnet_18",
        licence=licence,
        clean=clean,
        robust=robust,
    )


_DDPM = "cifar10_linf_resnet18_ddpm"
_DDPM_100M = "cifar10_linf_resnet18_ddpm_100m"
ENTRIES = (
    _entry(_DDPM, f"{FOLDER}{_DDPM}.pt", "Apache-2.0", 83.53, 56.66),
    _entry(_DDPM_100M, f"{FOLDER}{_DDPM_100M}.pt", "Apache-2.0", 87.35, 58.63),
    _entry(
        "Rade2021Helper_R18_ddpm", "drive:1f2yJUo-jxCQNk589frzriv6wPyrQEZdX", "MIT", 86.86, 57.09
    ),
    _entry(
        "Rade2021Helper_R18_extra", "drive:1hdXk1rPJql2Oa84Kky64fMTQzng5UcTL", "MIT", 89.02, 57.67
    ),
)
