"""CIFAR-10, LLR as in its released code: loss 2 l + 4 (gamma + 0.3 |<d, grad l>|).

Command:  python tools/train.py --config=configs/cifar10_llr_released.py
Paper:    no numbers for these weights: the code's lambda and mu are not the paper's.
Time:     not measured; by its passes a step costs about 10 of standard training.

WRN-28-8 with softplus, batch 64, 100,000 steps, ten search steps by Adam, radius warm-up over 500
steps. Deviations: see configs/llr_presets.py.
"""

from he_keras_configs import llr_presets


def get_config():
    """Returns the configuration."""
    return llr_presets.cifar10_llr("released", num_steps=10)
