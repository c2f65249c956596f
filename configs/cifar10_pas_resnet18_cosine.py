"""PAS on CIFAR-10, ResNet-18 of half the width: radius growing along half a cosine, no restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_resnet18_cosine.py
Paper:    errors in %: clean 18.43, PGD-100 53.85, APGD-CE 56.16,
          APGD-DLR 55.77, Square 49.60.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: learning rate 0.1, times 0.1 at epochs 100 and 150.
PAS's blocks are post-activation, these pre-activation.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("resnet18", "cosine")
