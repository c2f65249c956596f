"""PAS on CIFAR-10, ResNet-18 of half the width: radius growing along a line, no restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_resnet18_linear.py
Paper:    errors in %: clean 18.55, PGD-100 53.41, APGD-CE 55.69,
          APGD-DLR 55.45, Square 49.66.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: learning rate 0.1, times 0.1 at epochs 100 and 150.
PAS's blocks are post-activation, these pre-activation.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("resnet18", "linear")
