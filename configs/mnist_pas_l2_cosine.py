"""PAS on MNIST, LeNet, l2 4: radius growing along half a cosine.

Command:  python tools/train.py --config=configs/mnist_pas_l2_cosine.py
          (--config.optimizer.learning_rate=1e-3 for the rebuttal's higher rate)
Paper:    a figure only: with Adam at 1e-3 the constant radius fails to converge, schedules do not.
Time:     100 epochs of 60,000 images, 51 passes each; not run. On a CPU: mnist_pas_small.py.

The radius heads for 1.5 times 4 and stays at 4 once there.
The step size is chosen, as the text has none.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.mnist("l2", "cosine")
