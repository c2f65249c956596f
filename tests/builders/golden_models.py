"""The two golden classifiers as Keras models, and the reference outputs stored with them.

`goldens/README.md` says where every array comes from. Arrays are cached and read-only.
"""

import functools
import json
import pathlib

import keras
import numpy as np

import he_keras as he

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "goldens"
HEADS = ("linear", "he")
NUM_CLASSES = 10
SCALE = 15.0
EPSILON = 8 / 255


@functools.cache
def arrays(name):
    """Returns the arrays of `goldens/<name>.npz` by name."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        loaded = {key: stored[key] for key in stored.files}
    for array in loaded.values():
        array.setflags(write=False)
    return loaded


@functools.cache
def images():
    """The 64 images, float32 in [0, 1]."""
    return arrays("data")["x_uint8"] / np.float32(255)


def labels():
    """The labels of the 64 images."""
    return arrays("data")["y"]


@functools.cache
def autoattack_images():
    """The 256 images of the AutoAttack runs, float32 in [0, 1]."""
    return arrays("data")["aa_x_uint8"] / np.float32(255)


def autoattack_labels():
    """The labels of the 256 images."""
    return arrays("data")["aa_y"]


def outputs(block, head_name, attack):
    """Returns the fields of one attack in `attacks_<block>_<head>.npz` by name."""
    prefix = f"{attack}/"
    stored = arrays(f"attacks_{block}_{head_name}").items()
    return {key.removeprefix(prefix): array for key, array in stored if key.startswith(prefix)}


@functools.cache
def _tolerances():
    return json.loads((FOLDER / "tolerances.json").read_text())


def tolerances(head_name, attack):
    """Returns what `tolerances.json` allows for one attack."""
    return _tolerances()[f"{head_name}/{attack}"]


def network(head_name):
    """Builds a new network from images to the 64 features, with the stored weights."""
    stored = arrays(f"model_{head_name}")
    inputs = keras.Input((32, 32, 3))
    hidden = inputs
    for name, filters in (("conv1", 16), ("conv2", 32)):
        # PyTorch pads one zero on every side; "same" with stride 2 would pad only below and right.
        hidden = keras.layers.ZeroPadding2D(1)(hidden)
        layer = keras.layers.Conv2D(filters, 3, strides=2, activation="relu", name=name)
        hidden = layer(hidden)
    hidden = keras.layers.Flatten()(hidden)
    features = keras.layers.Dense(64, activation="relu", name="dense1")(hidden)
    built = keras.Model(inputs, features)
    for name in ("conv1", "conv2", "dense1"):
        built.get_layer(name).set_weights([stored[f"{name}_kernel"], stored[f"{name}_bias"]])
    return built


def head(head_name):
    """Builds a new head, `Dense` or `CosineHead` of scale 15, with the stored weights."""
    stored = arrays(f"model_{head_name}")
    if head_name == "linear":
        layer, weights = keras.layers.Dense(NUM_CLASSES), ["head_kernel", "head_bias"]
    else:
        layer, weights = he.CosineHead(NUM_CLASSES, scale=SCALE, margin=0.2), ["head_kernel"]
    layer.build((None, 64))
    layer.set_weights([stored[name] for name in weights])
    return layer


def classifier(head_name):
    """Builds a new functional model from images to (scaled) logits."""
    built = network(head_name)
    return keras.Model(built.input, head(head_name)(built.output))


def adversarial_model(head_name, objective=None):
    """Builds a new `HEAdversarialModel` of the same network and head."""
    return he.HEAdversarialModel(network(head_name), head(head_name), objective)


def float64_logits(head_name, x):
    """Logits of the float64 network in NumPy, the one that the stored losses were computed with."""
    stored = {
        name: array.astype(np.float64) for name, array in arrays(f"model_{head_name}").items()
    }
    hidden = np.asarray(x, np.float64)
    for name in ("conv1", "conv2"):
        hidden = _strided_convolution(hidden, stored[f"{name}_kernel"]) + stored[f"{name}_bias"]
        hidden = np.maximum(hidden, 0)
    hidden = hidden.reshape(len(hidden), -1) @ stored["dense1_kernel"] + stored["dense1_bias"]
    features, kernel = np.maximum(hidden, 0), stored["head_kernel"]
    if head_name == "linear":
        return features @ kernel + stored["head_bias"]
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    return SCALE * features @ (kernel / np.linalg.norm(kernel, axis=0, keepdims=True))


def _strided_convolution(hidden, kernel):
    """3x3 convolution with stride 2 and one zero of padding on every side."""
    padded = np.pad(hidden, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = hidden.shape[1] // 2, hidden.shape[2] // 2
    out = 0.0
    for row in range(3):
        for column in range(3):
            taken = padded[:, row : row + 2 * rows : 2, column : column + 2 * columns : 2]
            out = out + taken @ kernel[row, column]
    return out


def cross_entropy(logits, y):
    """Cross-entropy of each example, in the precision of the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(y)), y]
