"""DeepMind's WideResNets as JAX parameters and state."""

import dataclasses

from he_keras.zoo.recipe import Recipe
from he_keras.zoo.recipes import deepmind_wrn

RECIPE = Recipe(
    name="deepmind/jax",
    source="DeepMind, JAX",
    network="wide-resnet",
    layers={
        "init_conv": "stem_conv",
        "resnet_lay_{stage-}_block_{block-}.batchnorm_{n-}": "stage{stage}_block{block}_{n}_bn",
        "resnet_lay_{stage-}_block_{block-}.conv_{n-}": "stage{stage}_block{block}_{n}_conv",
        "resnet_lay_{stage-}_block_{block-}.shortcut": "stage{stage}_block{block}_shortcut_conv",
        "batchnorm": "final_bn",
    },
    head=("logits",),
    statistics=deepmind_wrn.RECIPE.statistics,
    options=deepmind_wrn.RECIPE.options,
    is_jax=True,
)
#: Every file of DeepMind is published in both forms, under the same name.
ENTRIES = tuple(
    dataclasses.replace(
        entry,
        name=entry.name.replace("deepmind/wrn", "deepmind/jax"),
        file=entry.file.removesuffix(".pt") + ".npy",
    )
    for entry in deepmind_wrn.ENTRIES
    if entry.file.startswith(deepmind_wrn.FOLDER)
)
