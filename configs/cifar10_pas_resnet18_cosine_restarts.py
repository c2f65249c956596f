"""PAS on CIFAR-10, ResNet-18 of half the width: radius growing along half a cosine, restarts.

Command:  python tools/train.py --config=configs/cifar10_pas_resnet18_cosine_restarts.py
Paper:    errors in %: clean 19.90, PGD-100 48.49, APGD-CE 49.71,
          APGD-DLR 50.54, Square 46.19.
Time:     200 epochs of 50,000 images, 11 passes each; not run here.

Chosen, as the text gives no number: four cycles of 50 epochs, learning rate 0.1 with drops at 1/2
and 3/4 of each.
PAS's blocks are post-activation, these pre-activation.
Where cycles end, the model is kept in snapshots/, for he_keras.SnapshotEnsemble.
"""

from he_keras_configs import pas_presets


def get_config():
    """Returns the configuration."""
    return pas_presets.cifar10("resnet18", "cosine", has_restarts=True)
