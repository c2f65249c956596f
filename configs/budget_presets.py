"""One small CPU budget for every method: what docs/RESULTS.md compares.

A pre-activation ResNet of three blocks (widths 16, 32, 64), bfloat16, batch 128, learning rate
0 -> 0.2 -> 0, weight decay 5e-4, epsilon 8/255, five attack steps of 4/255 from a uniform start.
49,000 images train, 1,000 are held out. A method whose step costs more than PGD-AT's gets fewer
epochs, so that all runs take about the same time; the number is in its configuration.
"""

from he_keras_configs import cifar10_small

EPOCHS = 6


def cifar10_budget(name: str, epochs: int = EPOCHS, head: str = "he"):
    """PGD-AT under the budget; `name` becomes `cifar10_budget_<name>`."""
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = f"cifar10_budget_{name}"
        config.network.name = "preact-resnet"
        config.network.options = {"stage_widths": (16, 32, 64), "blocks_per_stage": (1, 1, 1)}
        config.head.kind = head
        config.objective = {
            "name": "pgd_at",
            "num_steps": 5,
            "step_size": "4/255",
            "random_start": "uniform",
        }
        config.train.update({"epochs": epochs, "dtype": "mixed_bfloat16"})
        config.evaluation.attacks = ("pgd-20", "apgd-ce-100", "apgd-t-100")
    return config.lock()
