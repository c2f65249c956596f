"""CIFAR-10 on a CPU: FastAT on a pre-activation ResNet of 47 million multiply-adds.

Command:  python tools/train.py --config=configs/cifar10_small.py
          (--config.head.kind=linear for the baseline)
Time and numbers: docs/RESULTS.md, measured on two cores.
"""

from he_keras.experiment import default_config


def get_config():
    """Returns the configuration."""
    config = default_config()
    with config.unlocked():
        config.name = "cifar10_small"
        config.network.name = "preact-resnet-small"
        config.head.update({"scale": 15.0, "margin": 0.2})
        config.objective = {"name": "fast_at", "step_size": "10/255", "initialization": "random"}
        config.optimizer.update({"learning_rate": 0.2, "weight_decay": 5e-4})
        config.schedule = {"name": "triangular"}
        config.train.epochs = 10
        config.evaluation.step_size = "0.003"
    return config.lock()
