"""CIFAR-10 on a CPU: FastAT at epsilon 16/255, which collapses, and what keeps it from collapsing.

Command:  python tools/train.py --config=configs/cifar10_small_fast_at_16.py
          (--config=configs/cifar10_small_fast_at_16.py:n_fgsm for N-FGSM; also random_start,
          grad_align, elle, elle_a, fast_adv_plus)
Time and numbers: docs/RESULTS.md.
"""

from he_keras_configs import fast_at_large_epsilon_presets


def get_config(guard: str = "none"):
    """Returns the configuration; `guard` is what stands behind the colon of a command."""
    return fast_at_large_epsilon_presets.cifar10_small_fast_at(16, guard)
