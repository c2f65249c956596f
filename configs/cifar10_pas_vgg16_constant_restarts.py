"""PAS on CIFAR-10, VGG-16 of half the width: constant radius, restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_vgg16_constant_restarts.py
Paper:    errors in %: clean 28.33, PGD-100 54.16, APGD-CE 55.45,
          APGD-DLR 56.56, Square 52.85.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: four cycles of 50 epochs, learning rate 0.1 with drops at 1/2
and 3/4 of each.
Where cycles end, the model is kept in snapshots/, for he_keras.SnapshotEnsemble.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("vgg16", "constant", has_restarts=True)
