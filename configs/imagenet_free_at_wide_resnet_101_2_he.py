"""ImageNet, FreeAT + HE, wide-resnet-101-2: Table 4 of the HE paper.

Command:  python tools/train.py --config=configs/imagenet_free_at_wide_resnet_101_2_he.py
Paper:    clean 66.37, PGD-10 45.35, PGD-50 45.04, both measured around an already perturbed image.
Time:     not stated in the paper.

Needs imagenet2012 prepared by TFDS. Paper and code disagree on the training step: text 1/255,
released code (followed) 4/255.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.imagenet_free_at("wide-resnet-101-2", "he")
