"""Settings of PAS: radius schedules and periodic restarts (Liu et al. 2020), at two scales.

Sources: the rebuttal of "On the loss landscape of adversarial training: identifying challenges and
how to overcome them", its released code and README. They give neither the learning rates of the
CIFAR-10 experiments nor the number of periods with restarts: those here are chosen.
"""

from he_keras.experiment import default_config

# The radius heads for 1.5 times epsilon and stays at epsilon: the README's MNIST command. For
# CIFAR-10 and l2 the factor is chosen.
_OVERSHOOT = 1.5
_SCHEDULES = {"constant": "", "cosine": "cycle_cos", "linear": "cycle_linear"}
# Epsilon, and the step size of training and evaluation; those of l2 are chosen.
_MNIST = {"linf": ("0.4", "0.01"), "l2": ("4", "0.1"), "linf_03": ("0.3", "0.01")}
_CIFAR10_NETWORKS = {
    "vgg16": {"name": "vgg-16-bn", "options": {"width": 8, "standardize": False}},
    "resnet18": {
        "name": "preact-resnet",
        "options": {
            "stage_widths": (32, 64, 128, 256),
            "blocks_per_stage": (2, 2, 2, 2),
            "standardize": False,
        },
    },
}
_CYCLE_ENDS = (50, 100, 150, 200)


def mnist(threat: str, schedule: str):
    """LeNet on MNIST: threat "linf", "l2" or "linf_03"; "constant", "cosine" or "linear" radius."""
    config = default_config()
    epsilon, step_size = _MNIST[threat]
    with config.unlocked():
        config.name = f"mnist_pas_{threat}_{schedule}"
        config.data.update({"name": "mnist", "augmentation": "none"})
        config.network = {"name": "lenet", "input_shape": (28, 28, 1), "options": {"width": 16}}
        config.head.kind = "linear"
        config.threat.update({"norm": threat.partition("_")[0], "epsilon": epsilon})
        config.optimizer.update({"name": "adam", "learning_rate": 1e-4, "weight_decay": 0.0})
        config.objective = _adversary(50, step_size)
        config.epsilon_schedule = _radius(epsilon, schedule)
        config.train.update({"epochs": 100, "batch_size": 128})
        config.evaluation.step_size = step_size
        config.evaluation.attacks = _attacks()
        config.smoke = {"network": "lenet", "options": {"width": 2}, "input_shape": (28, 28, 1)}
    return config.lock()


def mnist_small(threat: str = "linf", schedule: str = "cosine"):
    """The same in minutes on a CPU: fewer images, epochs and attack steps, which are longer."""
    config = mnist(threat, schedule)
    with config.unlocked():
        config.name = f"{config.name}_small"
        config.data.update({"train_examples": 5_000, "validation_examples": 200})
        config.train.update({"epochs": 12, "batch_size": 64})
        config.objective = _adversary(10, "0.5" if threat == "l2" else "0.05")
        config.evaluation.step_size = ""
        config.evaluation.attacks = ("pgd-100", "apgd-ce-100", "apgd-dlr-100")
    return config.lock()


def cifar10(network: str, schedule: str, has_restarts: bool = False):
    """VGG-16 or a ResNet-18 of half the usual width, at 8/255, with restarts or without."""
    config = default_config()
    with config.unlocked():
        suffix = "_restarts" if has_restarts else ""
        config.name = f"cifar10_pas_{network}_{schedule}{suffix}"
        config.network = {"input_shape": (32, 32, 3), **_CIFAR10_NETWORKS[network]}
        config.head.kind = "linear"
        config.optimizer.weight_decay = 1e-4
        config.objective = _adversary(10, "2/255")
        config.epsilon_schedule = _radius("8/255", schedule)
        config.train.update({"epochs": 200, "batch_size": 128})
        config.schedule = {"name": "step", "drop_epochs": (100, 150), "drop_factor": 0.1}
        if has_restarts:
            config.schedule = {"name": "cycle_jump", "power": 0.1, "drop_points": (0.5, 0.75)}
            config.train.update({"cycle_ends": _CYCLE_ENDS, "snapshots": True})
        config.evaluation.step_size = "1/255"
        config.evaluation.attacks = _attacks()
        config.smoke = {
            "network": "preact-resnet",
            "options": {"stage_widths": (16, 32), "blocks_per_stage": (1, 1)},
            "input_shape": (32, 32, 3),
        }
    return config.lock()


def _attacks() -> tuple:
    return ("pgd-100", "apgd-ce-100", "apgd-dlr-100", "square-5000")


def _adversary(num_steps: int, step_size: str) -> dict:
    """PAS's PGD starts uniformly within one step of the image."""
    return {
        "name": "pgd_at",
        "num_steps": num_steps,
        "step_size": step_size,
        "random_start": _as_number(step_size),
    }


def _as_number(size: str) -> float:
    numerator, _, denominator = size.partition("/")
    return float(numerator) / float(denominator or 1)


def _radius(epsilon: str, schedule: str) -> dict:
    """The schedule of the radius over the whole run, or over each cycle."""
    if not _SCHEDULES[schedule]:
        return {"name": ""}
    numerator, slash, denominator = epsilon.partition("/")
    final = f"{_OVERSHOOT * float(numerator):g}{slash}{denominator}"
    return {"name": _SCHEDULES[schedule], "initial": "0", "final": final}
