"""PAS on MNIST, LeNet, linf 0.3: the rebuttal's comparison with the MNIST challenge.

Command:  python tools/train.py --config=configs/mnist_pas_linf_03_cosine.py
Paper:    accuracy under PGD-100 95.08 %, with 50 restarts 93.01 % (challenge: 92.52 and 89.62).
Time:     100 epochs of 60,000 images, 51 passes each; not run here.

The text names no schedule and no learning rate: those of linf 0.4 are taken.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.mnist("linf_03", "cosine")
