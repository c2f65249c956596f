"""CIFAR-10 on a CPU, on a network of 47 million multiply-adds: --config=cifar10_small:METHOD.

METHOD is fast_at (the default), standard, pgd_at, rat, awp or llr. The network is a pre-activation
ResNet with a hypersphere head; `--config.head.kind=linear` is the baseline.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog.experiment_entry import ExperimentEntry, parse_argument
from he_keras.experiment.configuration import default_config

METHODS = ("fast_at", "standard", "pgd_at", "rat", "awp", "llr")


def get_config(argument: str = "fast_at"):
    """Returns the configuration of "METHOD"."""
    (method,) = parse_argument("cifar10_small", argument, method=METHODS)
    config = default_config()
    with config.unlocked():
        config.name = "cifar10_small" if method == "fast_at" else f"cifar10_small_{method}"
        config.network.name = "preact-resnet-small"
        config.head.update({"scale": 15.0, "margin": 0.2})
        config.objective = {"name": "fast_at", "step_size": "10/255", "initialization": "random"}
        config.optimizer.update({"learning_rate": 0.2, "weight_decay": 5e-4})
        config.schedule = {"name": "triangular"}
        config.train.epochs = 10
        config.evaluation.step_size = "0.003"
        _CHANGES[method](config)
    return config.lock()


def _standard(config) -> None:
    config.head.kind = "linear"
    config.objective = {"name": "standard"}


def _pgd_at(config) -> None:
    """The step of 0.007 stays at every number of steps, as Fig. 2 changes only this number."""
    config.objective = {
        "name": "pgd_at",
        "num_steps": 10,
        "step_size": "0.007",
        "random_start": "gaussian",
    }
    config.train.epochs = 5


def _rat(config) -> None:
    config.objective = {
        "name": "rat",
        "base": "fast_at",
        "mode": "symmetric",
        "weight_noise": 1e-4,
        "step_size": "10/255",
    }


def _awp(config) -> None:
    config.objective = {
        "name": "awp",
        "base": "fast_at",
        "gamma": 0.005,
        "warm_up_steps": 0,
        "step_size": "10/255",
    }


def _llr(config) -> None:
    config.network.options = {"activation": "softplus"}
    config.objective = {"name": "llr", "num_steps": 2, "weights": "paper"}
    config.optimizer.learning_rate = 0.1


_CHANGES = {
    "fast_at": lambda config: None,
    "standard": _standard,
    "pgd_at": _pgd_at,
    "rat": _rat,
    "awp": _awp,
    "llr": _llr,
}
_BASELINE = "--config.head.kind=linear for the baseline"
_RESULTS = "docs/RESULTS.md, with the numbers, measured on two cores."


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment of this file."""
    yield ExperimentEntry(
        "cifar10_small",
        "cifar10_small",
        "",
        "CIFAR-10 on a CPU: FastAT on a pre-activation ResNet of 47 million multiply-adds.",
        time=_RESULTS,
        options=_BASELINE,
    )
    yield ExperimentEntry(
        "cifar10_small_standard",
        "cifar10_small",
        "standard",
        "CIFAR-10 on a CPU without an adversary: a small victim for FN in the attack.",
        time="one forward and backward pass an image, of cifar10_small's two.",
        notes=(
            "78.8 % of the first 1000 test images after 4 epochs (--config.train.epochs=4), one",
            "seed. docs/research/analysis.md uses it.",
        ),
    )
    yield ExperimentEntry(
        "cifar10_small_pgd_at",
        "cifar10_small",
        "pgd_at",
        "CIFAR-10 on a CPU: PGD-AT with any number of attack steps on cifar10_small's network.",
        time="a step costs 1 + num_steps times that of standard training.",
        notes=("No numbers are measured; docs/research/analysis.md shows the same on digits.",),
        options="--config.objective.num_steps=3 --output_dir=runs/he_k3 for another number of "
        "steps, --config.head.kind=linear for the baseline",
    )
    for method, title, time in (
        ("rat", "RAT's terms around FastAT on", "1.6 times that"),
        ("awp", "AWP around FastAT on", "1.6 times that"),
        ("llr", "LLR with two search steps, with softplus, on", "three, by its passes,"),
    ):
        gamma = (
            "AWP: gamma 0.005, which its released code has for TRADES; for adversarial training",
            "it has 0.01.",
        )
        yield ExperimentEntry(
            f"cifar10_small_{method}",
            "cifar10_small",
            method,
            f"CIFAR-10 on a CPU: {title} cifar10_small's network.",
            time=f"a step costs about {time} of cifar10_small; numbers in docs/RESULTS.md.",
            notes=gamma if method == "awp" else (),
            options=_BASELINE,
        )
