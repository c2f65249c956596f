"""PAS on MNIST at a CPU's scale, linf 0.4: radius growing along half a cosine.

Command:  python tools/train.py --config=configs/mnist_pas_small.py
          (--config.epsilon_schedule.name=cycle_linear for the line, an empty name for a constant
          radius; --config.optimizer.learning_rate=1e-3 for the higher rate; see mnist_pas_l2_small)
Time and numbers: docs/RESULTS.md, measured on two cores.

5,000 images, 12 epochs, batch 64 and PGD-10; the paper has 60,000, 100, 128 and PGD-50.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    config = pas_presets.mnist_small("linf")
    with config.unlocked():
        config.name = "mnist_pas_small"
    return config.lock()
