"""ImageNet, FreeAT + HE, wide-resnet-50-2: Table 4 of the HE paper.

Command:  python tools/train.py --config=configs/imagenet_free_at_wide_resnet_50_2_he.py
Paper:    clean 65.28, PGD-10 43.83, PGD-50 43.47, both measured around an already perturbed image.
Time:     not stated in the paper.

Needs imagenet2012 prepared by TFDS. Paper and code disagree on the training step: text 1/255,
released code (followed) 4/255.
"""

from he_keras_configs import presets


def get_config():
    """Returns the configuration."""
    return presets.imagenet_free_at("wide-resnet-50-2", "he")
