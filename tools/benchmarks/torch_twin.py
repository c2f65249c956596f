"""A pre-activation or wide ResNet in PyTorch, as its users write it, with a Keras one's weights."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        activated = functional.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        x = self.conv1(activated)
        return self.conv2(functional.relu(self.bn2(x))) + shortcut


class PreActResNet(nn.Module):
    """Images in [0, 1], channels first, to logits; a linear or a cosine head."""

    def __init__(
        self, stem: int, widths, blocks, num_classes: int, mean, std, scale: float | None
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.stem = nn.Conv2d(len(mean), stem, 3, 1, 1, bias=False)
        stages, channels = [], stem
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for block in range(count):
                stages.append(_Block(channels, width, 2 if stage and not block else 1))
                channels = width
        self.blocks = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes, bias=scale is None)
        self.scale = scale

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


def twin_of(model) -> PreActResNet:
    """Returns the PyTorch twin of an `HEAdversarialModel` on a pre-activation ResNet."""
    layers = {layer.name: layer for layer in model.network.layers}
    convolutions = [layer for name, layer in layers.items() if name.endswith("_1_conv")]
    if not convolutions or "standardization" not in layers:
        raise ValueError(
            "No PyTorch twin for this network; expected a pre-activation ResNet of he_keras; "
            f"received {model.network.name}"
        )
    stages: dict[str, list[int]] = {}
    for layer in convolutions:
        stages.setdefault(layer.name.split("_")[0], []).append(layer.filters)
    twin = PreActResNet(
        layers["stem_conv"].filters,
        [filters[0] for filters in stages.values()],
        [len(filters) for filters in stages.values()],
        model.head.kernel.shape[1],
        layers["standardization"].mean,
        layers["standardization"].std,
        getattr(model.head, "scale", None),
    )
    _copy_weights(layers, model.head, twin)
    return twin.eval()


def _copy_weights(layers: dict, head, twin: PreActResNet) -> None:
    _copy_convolution(layers["stem_conv"], twin.stem)
    _copy_norm(layers["final_bn"], twin.bn)
    prefixes = [name.removesuffix("_1_conv") for name in layers if name.endswith("_1_conv")]
    for prefix, block in zip(prefixes, twin.blocks, strict=True):
        for part in ("1", "2"):
            _copy_convolution(layers[f"{prefix}_{part}_conv"], getattr(block, f"conv{part}"))
            _copy_norm(layers[f"{prefix}_{part}_bn"], getattr(block, f"bn{part}"))
        if block.shortcut is not None:
            _copy_convolution(layers[f"{prefix}_shortcut_conv"], block.shortcut)
    with torch.no_grad():
        twin.head.weight.copy_(torch.from_numpy(np.array(head.kernel).T))
        if twin.head.bias is not None:
            twin.head.bias.copy_(torch.from_numpy(np.array(head.bias)))


def _copy_convolution(layer, convolution) -> None:
    with torch.no_grad():
        convolution.weight.copy_(torch.from_numpy(np.array(layer.kernel).transpose(3, 2, 0, 1)))


def _copy_norm(layer, norm) -> None:
    norm.eps = layer.epsilon
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(np.array(layer.gamma)))
        norm.bias.copy_(torch.from_numpy(np.array(layer.beta)))
        norm.running_mean.copy_(torch.from_numpy(np.array(layer.moving_mean)))
        norm.running_var.copy_(torch.from_numpy(np.array(layer.moving_variance)))
