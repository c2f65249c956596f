"""CIFAR-10 without adversary: the victim of Table 7 of the HE paper (FN in the attack).

Command:  python tools/train.py --config=configs/cifar10_standard_linear.py
          then tools/analyze.py feature-norm-attack, see docs/analysis.md
Paper:    accuracy under PGD-1 67.09 without FN and 62.89 with it, under PGD-2 50.37 and 33.75.
Time:     one forward and backward pass an image, where PGD-AT needs eleven.

The paper says no more than "standardly trained WRN-34-10"; everything else is as in Table 2.
"""

from he_keras_configs import analysis_presets


def get_config():
    """Returns the configuration."""
    return analysis_presets.cifar10_standard_linear()
