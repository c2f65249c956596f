"""ImageNet, LLR at epsilon 4/255: lambda 3, mu 6, two search steps.

Command:  python tools/train.py --config=configs/imagenet_llr.py
Paper:    the rebuttal gives no accuracies for ImageNet.
Time:     not measured; the rebuttal says about twice standard training (by our count of passes
          five times), against 30 times for adversarial training.

No released settings exist: the weights, the steps and epsilon are the paper's; ResNet-152 and
everything else (90 epochs, batch 256, learning rate 0.1 with three drops, weight decay 1e-4) are
ours, those of standard ImageNet training.
"""

from he_keras_configs import llr_presets


def get_config():
    """Returns the configuration."""
    return llr_presets.imagenet_llr()
