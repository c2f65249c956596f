"""A pre-activation or wide ResNet in PyTorch, as its users write it, with a Keras one's weights."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from he_keras.benchmarks.network_weights import Block, NetworkWeights, Norm


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, is_plain: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut = None
        if not is_plain:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        activated = functional.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        x = self.conv1(activated)
        return self.conv2(functional.relu(self.bn2(x))) + shortcut


class PreActResNet(nn.Module):
    """Images in [0, 1], channels first, to logits; a linear or a cosine head.

    Args:
        weights: of the Keras network; its shapes are the architecture.
    """

    def __init__(self, weights: NetworkWeights) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(weights.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(weights.std).view(1, -1, 1, 1))
        _, _, channels, stem = weights.stem.shape
        self.stem = nn.Conv2d(channels, stem, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*(_block_of(block) for block in weights.blocks))
        features, num_classes = weights.head_kernel.shape
        self.bn = nn.BatchNorm2d(features)
        self.head = nn.Linear(features, num_classes, bias=weights.head_bias is not None)
        self.scale = weights.scale

    def forward(self, images):
        """Returns logits."""
        x = self.blocks(self.stem((images - self.mean) / self.std))
        features = functional.relu(self.bn(x)).mean((2, 3))
        if self.scale is None:
            return self.head(features)
        cosines = functional.linear(
            functional.normalize(features), functional.normalize(self.head.weight)
        )
        return self.scale * cosines


def twin_of(weights: NetworkWeights) -> PreActResNet:
    """Returns the PyTorch twin of a network."""
    twin = PreActResNet(weights)
    with torch.no_grad():
        _copy_convolution(weights.stem, twin.stem)
        _copy_norm(weights.norm, twin.bn)
        for block, part in zip(weights.blocks, twin.blocks, strict=True):
            _copy_block(block, part)
        twin.head.weight.copy_(torch.from_numpy(weights.head_kernel.T))
        if weights.head_bias is not None:
            twin.head.bias.copy_(torch.from_numpy(weights.head_bias))
    return twin.eval()


def _block_of(block: Block) -> _Block:
    _, _, channels_in, channels_out = block.kernels[0].shape
    return _Block(channels_in, channels_out, block.stride, block.shortcut is None)


def _copy_block(block: Block, part: _Block) -> None:
    _copy_norm(block.norms[0], part.bn1)
    _copy_norm(block.norms[1], part.bn2)
    _copy_convolution(block.kernels[0], part.conv1)
    _copy_convolution(block.kernels[1], part.conv2)
    if block.shortcut is not None:
        _copy_convolution(block.shortcut, part.shortcut)


def _copy_convolution(kernel: np.ndarray, convolution) -> None:
    convolution.weight.copy_(torch.from_numpy(kernel.transpose(3, 2, 0, 1)))


def _copy_norm(norm: Norm, layer) -> None:
    layer.eps = norm.epsilon
    layer.weight.copy_(torch.from_numpy(norm.gamma))
    layer.bias.copy_(torch.from_numpy(norm.beta))
    layer.running_mean.copy_(torch.from_numpy(norm.mean))
    layer.running_var.copy_(torch.from_numpy(norm.variance))
