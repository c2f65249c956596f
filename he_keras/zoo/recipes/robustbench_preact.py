"""RobustBench's `PreActResNet`. The shortcut differs between files, so the entry names it."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import PREACT_RESNET, ROBUSTBENCH_STATISTICS

RECIPE = Recipe(
    name="robustbench/preact",
    source="RobustBench, class PreActResNet",
    network="preact-resnet",
    layers=PREACT_RESNET,
    head=("linear",),
    containers=("state_dict", "last"),
    prefixes=("module.", "model."),
    statistics=CIFAR_STATISTICS,
    stored_statistics=ROBUSTBENCH_STATISTICS,
)
#: As Rice et al. wrote them.
CIFAR100_STATISTICS = (
    (0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
    (0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
)


def _entry(name: str, key: str, clean: float, robust: float | None, **fields) -> Entry:
    return Entry(
        name=f"robustbench/preact/{name}",
        file=f"drive:{key}",
        network="preact_resnet_18",
        licence="MIT",
        clean=clean,
        robust=robust,
        **fields,
    )


_RAW = {"options": {"shortcut": "input"}}
ENTRIES = (
    _entry("Wong2020Fast", "1Re--_lf3jCEw9bnQqGkjw3J7v2tSZKrv", 83.34, 43.21, changes=_RAW),
    _entry(
        "Andriushchenko2020Understanding",
        "1Uyvprd98bIyxfMjLdCZwm-NEJ-6GMVis",
        79.84,
        43.93,
        changes={"statistics": False, **_RAW},
    ),
    _entry(
        "Rice2020Overfitting-l2",
        "1jo-31utiYNBVzLM0NxUEWz0teo3Z0xa7",
        88.67,
        67.68,
        norm="l2",
        epsilon="0.5",
    ),
    _entry(
        "Rice2020Overfitting-cifar100",
        "1XXNZn3fZBOkD1aqNL1cvcD8zZDccyAZ6",
        53.83,
        18.95,
        data="cifar100",
        changes={"statistics": CIFAR100_STATISTICS},
    ),
    _entry(
        "Kireev2021Effectiveness_RLAT",
        "16bCDA_5Rhr6qMKHRAO5W-4nu9_10kFyF",
        93.10,
        None,
        epsilon=None,
        remark="84.10 on corruptions",
    ),
    _entry(
        "Kireev2021Effectiveness_RLATAugMix",
        "19HNTdqJiuNyqFqIarPejniJEjZ3RQ_nj",
        94.75,
        None,
        epsilon=None,
        remark="89.60 on corruptions",
    ),
)
