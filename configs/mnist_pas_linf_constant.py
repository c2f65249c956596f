"""PAS on MNIST, LeNet, linf 0.4: constant radius.

Command:  python tools/train.py --config=configs/mnist_pas_linf_constant.py
          (--config.optimizer.learning_rate=1e-3 for the rebuttal's higher rate)
Paper:    errors in %: clean 1.56, PGD-100 10.86, APGD-CE 15.18,
          APGD-DLR 14.70, Square 19.58 (PGD with 10
          restarts, APGD with 5).
Time:     100 epochs of 60,000 images, 51 passes each; not run. On a CPU: mnist_pas_small.py.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.mnist("linf", "constant")
