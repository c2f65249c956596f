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
ENTRIES = (
    Entry(
        name="deepmind/preact/cifar10_linf_resnet18_ddpm",
        file=f"{FOLDER}cifar10_linf_resnet18_ddpm.pt",
        network="preact_resnet_18",
        licence="Apache-2.0",
        clean=83.53,
        robust=56.66,
    ),
    Entry(
        name="deepmind/preact/cifar10_linf_resnet18_ddpm_100m",
        file=f"{FOLDER}cifar10_linf_resnet18_ddpm_100m.pt",
        network="preact_resnet_18",
        licence="Apache-2.0",
        clean=87.35,
        robust=58.63,
    ),
)
