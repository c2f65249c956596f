"""PAS on CIFAR-10, VGG-16 of half the width: radius growing along a line, no restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_vgg16_linear.py
Paper:    errors in %: clean 23.56, PGD-100 55.88, APGD-CE 57.74,
          APGD-DLR 58.39, Square 53.66.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: learning rate 0.1, times 0.1 at epochs 100 and 150.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("vgg16", "linear")
