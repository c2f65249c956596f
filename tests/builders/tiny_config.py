"""A complete experiment of a few seconds, for tests: `--config=tests/builders/tiny_config.py`.

Everything that makes resuming hard is in it: random starts, augmentation, batch norm and momentum.
Also a learning rate that changes at every step, a short last batch, and validation with an attack.
"""

from he_keras.experiment import default_config


def get_config():
    """Returns the configuration."""
    config = default_config()
    with config.unlocked():
        config.name = "tiny"
        config.data.update({"name": "digits", "augmentation": "crop-flip"})
        config.data.update({"train_examples": 58, "validation_examples": 20, "test_examples": 30})
        config.network = {
            "name": "preact-resnet",
            "input_shape": (8, 8, 1),
            "options": {
                "stage_widths": (16,),
                "blocks_per_stage": (1,),
                "standardize": False,
            },
        }
        config.threat.epsilon = "0.1"
        config.objective = {
            "name": "pgd_at",
            "num_steps": 2,
            "step_size": "0.05",
            "random_start": "uniform",
        }
        config.schedule = {"name": "triangular"}
        config.train.update({"epochs": 3, "batch_size": 16, "checkpoint_every_batches": 1})
        config.evaluation.update({"attacks": ("fgsm", "pgd-2"), "batch_size": 16})
        config.evaluation.validation_attack = "pgd-2"
    return config.lock()
