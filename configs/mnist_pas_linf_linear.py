"""PAS on MNIST, LeNet, linf 0.4: radius growing along a line.

Command:  python tools/train.py --config=configs/mnist_pas_linf_linear.py
          (--config.optimizer.learning_rate=1e-3 for the rebuttal's higher rate)
Paper:    errors in %: clean 1.06, PGD-100 8.79, APGD-CE 13.91,
          APGD-DLR 13.17, Square 17.05 (PGD with 10
          restarts, APGD with 5).
Time:     100 epochs of 60,000 images, 51 passes each; not run. On a CPU: mnist_pas_small.py.

The radius heads for 1.5 times 0.4 and stays at 0.4 once there (README).
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.mnist("linf", "linear")
