"""PAS on CIFAR-10, VGG-16 of half the width: constant radius, no restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_vgg16_constant.py
Paper:    errors in %: clean 28.25, PGD-100 56.19, APGD-CE 58.18,
          APGD-DLR 58.65, Square 54.37.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: learning rate 0.1, times 0.1 at epochs 100 and 150.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("vgg16", "constant")
