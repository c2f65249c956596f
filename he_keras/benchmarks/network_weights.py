"""The weights of a pre-activation or wide ResNet of he_keras as plain arrays.

PyTorch's twin is built from these, so that its process need not import TensorFlow. Both bring an
LLVM of their own, and the second one to be loaded ends the process.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Norm:
    """A batch normalization."""

    gamma: np.ndarray
    beta: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    epsilon: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Two pre-activated convolutions and, where shapes change, a third past them."""

    norms: tuple[Norm, Norm]
    kernels: tuple[np.ndarray, np.ndarray]
    stride: int
    shortcut: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class NetworkWeights:
    """A whole network with its head; kernels are (height, width, in, out)."""

    mean: np.ndarray
    std: np.ndarray
    stem: np.ndarray
    blocks: tuple[Block, ...]
    norm: Norm
    head_kernel: np.ndarray
    head_bias: np.ndarray | None
    scale: float | None


def weights_of(model) -> NetworkWeights:
    """Returns the weights of an `HEAdversarialModel` on a pre-activation ResNet."""
    layers = {layer.name: layer for layer in model.network.layers}
    prefixes = [name.removesuffix("_1_conv") for name in layers if name.endswith("_1_conv")]
    if not prefixes or "standardization" not in layers:
        raise ValueError(
            "No PyTorch twin for this network; expected a pre-activation ResNet of he_keras; "
            f"received {model.network.name}"
        )
    bias = getattr(model.head, "bias", None)
    return NetworkWeights(
        np.array(layers["standardization"].mean, "float32"),
        np.array(layers["standardization"].std, "float32"),
        np.array(layers["stem_conv"].kernel),
        tuple(_block(layers, prefix) for prefix in prefixes),
        _norm(layers["final_bn"]),
        np.array(model.head.kernel),
        None if bias is None else np.array(bias),
        getattr(model.head, "scale", None),
    )


def _block(layers: dict, prefix: str) -> Block:
    first, second = layers[f"{prefix}_1_conv"], layers[f"{prefix}_2_conv"]
    shortcut = layers.get(f"{prefix}_shortcut_conv")
    return Block(
        (_norm(layers[f"{prefix}_1_bn"]), _norm(layers[f"{prefix}_2_bn"])),
        (np.array(first.kernel), np.array(second.kernel)),
        first.strides[0],
        None if shortcut is None else np.array(shortcut.kernel),
    )


def _norm(layer) -> Norm:
    return Norm(
        np.array(layer.gamma),
        np.array(layer.beta),
        np.array(layer.moving_mean),
        np.array(layer.moving_variance),
        layer.epsilon,
    )
