"""CIFAR-10 on a CPU: PGD-AT with any number of attack steps on the network of cifar10_small.

Command:  python tools/train.py --config=configs/cifar10_small_pgd_at.py
          (--config.objective.num_steps=3 --output_dir=runs/he_k3 for another number of steps,
          --config.head.kind=linear for the baseline)
Time:     a step costs 1 + num_steps times that of standard training.
Numbers:  none measured; docs/analysis.md shows the same comparison on digits.
"""

from he_keras_configs import analysis_presets


def get_config():
    """Returns the configuration."""
    return analysis_presets.cifar10_small_pgd_at()
