"""One small CPU budget for every method: --config=cifar10_budget:NAME; see docs/RESULTS.md.

NAME is pgd_at (linear head, the baseline), he, ema, pas, rat, awp or llr. The network is a
pre-activation ResNet of three blocks (widths 16, 32, 64) in bfloat16. Training has batch 128,
learning rate 0 -> 0.2 -> 0 and weight decay 5e-4. The attack has epsilon 8/255 and takes five steps
of 4/255 from a uniform start. 49,000 images train, 1,000 are held out. A method whose step costs
more than PGD-AT's gets fewer epochs, so that all runs take about the same time.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog import cifar10_small
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry, parse_argument

#: The methods, and their epochs within the budget, by the measured time of a step.
EPOCHS = {"pgd_at": 6, "he": 6, "ema": 6, "pas": 6, "rat": 5, "awp": 5, "llr": 2}


def get_config(argument: str = "he"):
    """Returns the configuration of "NAME"."""
    (name,) = parse_argument("cifar10_budget", argument, name=tuple(EPOCHS))
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = f"cifar10_budget_{name}"
        config.network.name = "preact-resnet"
        config.network.options = {"stage_widths": (16, 32, 64), "blocks_per_stage": (1, 1, 1)}
        config.head.kind = "linear" if name == "pgd_at" else "he"
        config.objective = {
            "name": "pgd_at",
            "num_steps": 5,
            "step_size": "4/255",
            "random_start": "uniform",
        }
        config.train.update({"epochs": EPOCHS[name], "dtype": "mixed_bfloat16"})
        config.evaluation.attacks = ("pgd-20", "apgd-ce-100", "apgd-t-100")
        _change(config, name)
    return config.lock()


def _change(config, name: str) -> None:
    """Turns PGD-AT under the budget into another method."""
    if name == "ema":
        config.train.weight_averaging.update({"kind": "ema", "decay": 0.99})
    if name == "pas":
        config.epsilon_schedule = {
            "name": "cycle_cos",
            "initial": "0",
            "final": "12/255",
            "unit": "batch",
        }
    if name == "rat":
        config.objective.update({"name": "rat", "base": "pgd_at", "weight_noise": 1e-4})
    if name == "awp":
        config.objective.update({"name": "awp", "base": "pgd_at", "gamma": 0.005})
    if name == "llr":
        config.network.options = {**config.network.options, "activation": "softplus"}
        config.objective = {"name": "llr", "num_steps": 2, "weights": "paper"}
        config.optimizer.learning_rate = 0.1
        # The deviation is a small difference of losses, which bfloat16 would round away.
        config.train.dtype = "float32"


_TITLES = {
    "pgd_at": "PGD-AT with a linear head, the baseline",
    "he": "PGD-AT with the hypersphere head",
    "ema": "PGD-AT, hypersphere head, exponential moving average",
    "pas": "PGD-AT, hypersphere head, radius on PAS's cosine schedule",
    "rat": "PGD-AT with RAT's terms and the hypersphere head",
    "awp": "PGD-AT with AWP and the hypersphere head",
    "llr": "LLR with the hypersphere head",
}
_FEWER = "Fewer epochs, as a step costs about a fifth more."
_NOTES = {
    "ema": (
        "The average has the decay 0.99: at 382 steps an epoch, 0.9995 would mostly average a",
        "run's start.",
    ),
    "pas": ("The radius heads for 12/255 and stays at 8/255 from about 60 % of the run on.",),
    "rat": (_FEWER,),
    "awp": (
        "AWP: gamma 0.005, which its released code has for TRADES; for adversarial training",
        "it has 0.01.",
        _FEWER,
    ),
    "llr": ("In float32, with two epochs, by the measured time of a step.",),
}


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment of this file."""
    for name, title in _TITLES.items():
        yield ExperimentEntry(
            f"cifar10_budget_{name}",
            "cifar10_budget",
            name,
            f"CIFAR-10 under one small CPU budget: {title}.",
            time="docs/RESULTS.md, with the numbers.",
            notes=_NOTES.get(name, ()),
            options="--config.seed=1 for another seed",
        )
