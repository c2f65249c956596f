"""MadryLab's robustness package. Its files contain mean and deviation, and every tensor twice."""

from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import RESNET

RECIPE = Recipe(
    name="madry",
    source="MadryLab, package robustness",
    network="resnet",
    layers=RESNET,
    head=("linear", "fc"),
    containers=("model", "state_dict"),
    prefixes=("module.", "model."),
    ignored=("attacker.*", "*.num_batches_tracked"),
    statistics=None,
    stored_statistics=(("normalizer.new_mean", "normalizer.new_std"),),
)


def _entry(name: str, key: str, norm: str, epsilon: str | None, **figures) -> Entry:
    on_imagenet = name.startswith("imagenet")
    return Entry(
        name=f"madry/{name}",
        file=f"https://www.dropbox.com/s/{key}/{name}.pt?dl=1",
        network="resnet_50",
        licence="MIT",
        data="imagenet2012" if on_imagenet else "cifar10",
        norm=norm,
        epsilon=epsilon,
        changes={"input_shape": (224, 224, 3)} if on_imagenet else {},
        **figures,
    )


ENTRIES = (
    _entry("cifar_nat", "yhpp4yws7sgi6lj", "l2", None, clean=95.25),
    _entry("cifar_l2_0_25", "2qsp7pt6t7uo71w", "l2", "0.25", clean=92.77),
    _entry("cifar_l2_0_5", "1zazwjfzee7c8i4", "l2", "0.5", clean=90.83, robust=69.24),
    _entry("cifar_l2_1_0", "s2x7thisiqxz095", "l2", "1.0", clean=81.62),
    _entry("cifar_linf_8", "c9qlt1lbdnu9tlo", "linf", "8/255", clean=87.03, robust=49.25),
    _entry("imagenet_l2_3_0", "knf4uimlqsi1yz8", "l2", "3.0", clean=57.90),
    _entry("imagenet_linf_4", "axfuary2w1cnyrg", "linf", "4/255", clean=62.42, robust=29.22),
    _entry("imagenet_linf_8", "yxn15a9zklz3s8q", "linf", "8/255", clean=47.91),
)
