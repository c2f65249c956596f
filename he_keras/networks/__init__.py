"""Networks of the papers: images in [0, 1] in, a feature vector out.

Any `keras.Model` that ends in a feature vector serves as a network of an adversarial model. These
are plain functional ones. `get` builds one by its name, `names` lists the names, and the functions
in CamelCase build a family. All of them take

* `input_shape`: `(height, width, channels)`;
* `standardize`: whether to standardise the images inside the network. False leaves them as they
  are, `(mean, std)` gives the constants of the channels, and True takes those of the likely data
  set: MNIST's for one channel, for three channels ImageNet's if height and width are at least 64
  and CIFAR-10's below. LeNet and SmallCNN, the networks for MNIST, have False as default;
* `activation`: "relu", "softplus" or "swish";
* `synchronized`: whether batch norm takes its statistics over all replicas of a `tf.distribute`
  strategy;
* `name`: the name of the model (`get` gives it the name that was asked for).

Convolutions are padded as PyTorch pads them and drawn from N(0, 2 / (k * k * c_out)). Batch norm
has momentum 0.9 and epsilon 1e-5. Under a mixed dtype policy the features come in the compute
dtype.

A further network is one file: see `he_keras/networks/network.py`.
"""

from he_keras.networks.lenet import LeNet
from he_keras.networks.mobilenet_v2 import MobileNetV2
from he_keras.networks.network import get, names, register
from he_keras.networks.preact_resnet import PreActResNet, PreActResNet18
from he_keras.networks.resnet import ResNet
from he_keras.networks.small_cnn import SmallCNN
from he_keras.networks.vgg import VGG16BN
from he_keras.networks.wide_resnet import WideResNet

__all__ = [
    "LeNet",
    "MobileNetV2",
    "PreActResNet",
    "PreActResNet18",
    "ResNet",
    "SmallCNN",
    "VGG16BN",
    "WideResNet",
    "get",
    "names",
    "register",
]
