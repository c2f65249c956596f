"""RobustBench's `WideResNet`: names as in TRADES, and a standardisation that the entry names."""

from he_keras.networks.network import CIFAR_STATISTICS
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes.layer_maps import ROBUSTBENCH_STATISTICS, WIDE_RESNET, WIDE_RESNET_IGNORED

RECIPE = Recipe(
    name="robustbench/wrn",
    source="RobustBench, class WideResNet",
    network="wide-resnet",
    layers=WIDE_RESNET,
    head=("fc",),
    containers=("state_dict",),
    prefixes=("module.", "model."),
    ignored=WIDE_RESNET_IGNORED,
    stored_statistics=ROBUSTBENCH_STATISTICS,
)
#: Hendrycks et al. map images to [-1, 1].
_TWICE_MINUS_ONE = ((0.5,) * 3, (0.5,) * 3)
_STANDARDIZED = {"changes": {"statistics": CIFAR_STATISTICS}}


def _entry(name: str, sizes: str, key: str, clean: float, robust: float, **fields) -> Entry:
    return Entry(
        name=f"robustbench/wrn/{name}",
        file=f"drive:{key}",
        network=f"wide_resnet_{sizes}",
        clean=clean,
        robust=robust,
        **{"licence": "MIT", **fields},
    )


ENTRIES = (
    _entry("Carmon2019Unlabeled", "28_10", "15tUx-gkZMYx7BfEOw1GY5OKC-jECIsPQ", 89.69, 59.53),
    _entry("Wang2020Improving", "28_10", "1T939mU4kXYt5bbvM55aT4fLBvRhyzjiQ", 87.50, 56.29),
    _entry(
        "Zhang2019Theoretically",
        "34_10",
        "1hPz9QQwyM7QSuWu-ANG_uXR-29xtL8t_",
        84.92,
        53.08,
        epsilon="0.031",
    ),
    _entry("Sehwag2021Proxy", "34_10", "1QFA5fPMj2Qw4aYNG33PkFqiv_RTDWvzm", 86.68, 60.27),
    _entry("Wu2020Adversarial", "34_10", "13LBcgNvhFppCFG22i1xATrahFPfMgXGf", 85.36, 56.17),
    _entry("Standard", "28_10", "1t98aEuzeTL8P7Kpd5DIrCoCL21BNZUhC", 94.78, 0.0),
    _entry(
        "Rice2020Overfitting",
        "34_20",
        "1vC_Twazji7lBjeMQvAD9uEQxi9Nx2oG-",
        85.34,
        53.42,
        **_STANDARDIZED,
    ),
    _entry(
        "Chen2020Efficient",
        "34_10",
        "1c5EXpd3Kn_s6qQIbkLX3tTOOPC8VslHg",
        85.32,
        51.12,
        **_STANDARDIZED,
    ),
    _entry(
        "Hendrycks2019Using",
        "28_10",
        "1-DcJsYw2dNEOyF9epks2QS7r9nqBDEsw",
        87.11,
        54.92,
        licence="Apache-2.0",
        changes={"statistics": _TWICE_MINUS_ONE},
    ),
)
