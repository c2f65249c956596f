"""CIFAR-10, LLR with the weights of the paper: lambda 4, mu 3, 15 search steps.

Command:  python tools/train.py --config=configs/cifar10_llr_paper.py
Paper:    DeepFool accuracy 71.43 (rebuttal, WRN-28, preliminary; TRADES 63.49).
Time:     not measured; by its passes a step costs about 14 of standard training.

The weights are those of the paper; everything else is the released code's
(configs/cifar10_llr_released.py), which uses ten search steps. The rebuttal names 15 for the best
model.
"""

from he_keras_configs import llr_presets


def get_config():
    """Returns the configuration."""
    return llr_presets.cifar10_llr("paper", num_steps=15)
