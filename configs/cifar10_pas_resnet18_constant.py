"""PAS on CIFAR-10, ResNet-18 of half the width: constant radius, no restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_resnet18_constant.py
Paper:    errors in %: clean 18.62, PGD-100 54.97, APGD-CE 57.26,
          APGD-DLR 56.60, Square 50.59.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: learning rate 0.1, times 0.1 at epochs 100 and 150.
PAS's blocks are post-activation, these pre-activation.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("resnet18", "constant")
