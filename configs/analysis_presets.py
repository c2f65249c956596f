"""Settings of the runs that the analyses compare, where no flag makes them of another experiment.

Standard training is the victim of the HE paper's Table 7; PGD-AT on a small network is its Fig. 2
(left) on two CPU cores. The other analyses need no file of their own: docs/analysis.md lists the
commands.
"""

from he_keras_configs import cifar10_small, presets


def cifar10_standard_linear():
    """Table 2's training without adversary."""
    config = presets.cifar10("pgd_at", "linear")
    with config.unlocked():
        config.name = "cifar10_standard_linear"
        config.objective = {"name": "standard"}
    return config.lock()


def cifar10_small_standard():
    """The small network of `cifar10_small`, trained on clean images."""
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = "cifar10_small_standard"
        config.head.kind = "linear"
        config.objective = {"name": "standard"}
    return config.lock()


def cifar10_small_pgd_at():
    """The small network of `cifar10_small`, trained by PGD-AT with the steps of the released code.

    The step of 0.007 is kept at every number of steps, as Fig. 2 changes only this number.
    """
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = "cifar10_small_pgd_at"
        config.objective = {
            "name": "pgd_at",
            "num_steps": 10,
            "step_size": "0.007",
            "random_start": "gaussian",
        }
        config.train.epochs = 5
    return config.lock()
