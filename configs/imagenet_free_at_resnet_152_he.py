"""ImageNet, FreeAT + HE, resnet-152: Table 4 of the HE paper.

Command:  python tools/train.py --config=configs/imagenet_free_at_resnet_152_he.py
Paper:    clean 65.41, PGD-10 43.24, PGD-50 42.60, both measured around an already perturbed image.
Time:     not stated in the paper.

Needs imagenet2012 prepared by TFDS. Paper and code disagree on the training step: text 1/255,
released code (followed) 4/255.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.imagenet_free_at("resnet-152", "he")
