"""FastAT at large epsilon on a CPU, and what keeps it from collapsing.

--config=cifar10_large_epsilon:EPSILON,GUARD, where EPSILON is 12 or 16 (in 1/255) and GUARD is
none, random_start, n_fgsm, grad_align, elle, elle_a or fast_adv_plus.

The network of the small budget (pre-activation ResNet of three blocks, widths 16, 32, 64) with a
linear head, in bfloat16. All runs of one epsilon share everything but the objective. The guard of
`callbacks` watches and does not interfere, except for FastAdv+. Without a guard ("none") FastAT
starts at the image, as GradAlign, ELLE and FastAdv+ do here: they add to it and change nothing.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog import cifar10_small
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry, parse_argument

EPSILONS = ("12", "16")
#: Keys of the objective by the name of the guard.
GUARDS: dict[str, dict] = {
    "none": {"name": "fast_at", "initialization": "zero"},
    "random_start": {"name": "fast_at", "initialization": "random"},
    "n_fgsm": {"name": "n_fgsm"},
    "grad_align": {"name": "grad_align"},
    "elle": {"name": "elle"},
    "elle_a": {"name": "elle", "adaptive": True},
    "fast_adv_plus": {"name": "fast_adv_plus", "initialization": "zero"},
}


def get_config(argument: str = "12,none"):
    """Returns the configuration of "EPSILON,GUARD"; the attack is in training mode as released."""
    epsilon, guard = parse_argument(
        "cifar10_large_epsilon", argument, epsilon=EPSILONS, guard=tuple(GUARDS)
    )
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = _name(epsilon, guard)
        config.network.name = "preact-resnet"
        config.network.options = {"stage_widths": (16, 32, 64), "blocks_per_stage": (1, 1, 1)}
        config.head.kind = "linear"
        config.threat.epsilon = f"{epsilon}/255"
        config.objective = {**GUARDS[guard], "attack_training_mode": True}
        config.train.update({"epochs": 10, "dtype": "mixed_bfloat16", "overfitting_guard": True})
        config.train.guard_on_collapse = "recover" if guard == "fast_adv_plus" else "monitor"
        config.train.guard_max_drop = 0.1
        config.train.guard_every_batches = 20
        config.evaluation.validation_attack = "pgd-10"
        config.evaluation.attacks = ("pgd-50", "apgd-dlr-50")
        config.evaluation.mode = "survivors"
        config.evaluation.step_size = f"{int(epsilon) / 4:g}/255"
    return config.lock()


def _name(epsilon: str, guard: str) -> str:
    return f"cifar10_small_fast_at_{epsilon}" + ("" if guard == "none" else f"_{guard}")


_TITLES = {
    "none": "which collapses",
    "random_start": "from a random start",
    "n_fgsm": "by N-FGSM",
    "grad_align": "with GradAlign",
    "elle": "with ELLE",
    "elle_a": "with ELLE-A",
    "fast_adv_plus": "with FastAdv+",
}


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment of this file."""
    for epsilon in EPSILONS:
        for guard, title in _TITLES.items():
            yield ExperimentEntry(
                _name(epsilon, guard),
                "cifar10_large_epsilon",
                f"{epsilon},{guard}",
                f"CIFAR-10 on a CPU: FastAT at epsilon {epsilon}/255, {title}.",
                time="docs/RESULTS.md, with the numbers.",
            )
