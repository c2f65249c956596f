"""Small checkpoints in the layouts of public ones, made anew from their rule.

`goldens/checkpoints/<name>.npz` holds the names and shapes of a file's tensors, the seed of the
rule that drew them, images, and the logits of the published code in float64.
"""

import pathlib
import re
import zlib
from typing import NamedTuple

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "checkpoints"
_PREFIXES = ("module.", "attacker.model.", "attacker.", "model.")


class Golden(NamedTuple):
    state: dict
    images: np.ndarray
    logits: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def golden(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as stored:
        columns = {key: stored[key] for key in stored.files}
    state = {}
    for line in columns["keys"]:
        key, shape, dtype = parsed(str(line))
        state[key] = _drawn(int(columns["seed"]), key, shape, columns).astype(dtype)
    images = columns["images"] / np.float32(255)
    return Golden(state, images, columns["logits"], columns["mean"], columns["std"])


def parsed(line: str) -> tuple[str, tuple[int, ...], str]:
    key, shape = line.split(" ", 1)
    shape, dtype = shape.rsplit(" ", 1)
    return key, tuple(int(size) for size in shape.strip("()").split(",") if size), dtype


def _drawn(seed: int, key: str, shape: tuple[int, ...], columns) -> np.ndarray:
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    if key.endswith("num_batches_tracked"):
        return np.array(1234)
    for constant, endings in (("mean", ("mu", "mean")), ("std", ("sigma", "std"))):
        if key.endswith(endings) and "running" not in key:
            return columns[constant].reshape(shape)
    generator = np.random.RandomState(zlib.crc32(f"{seed}:{key}".encode()))
    if len(shape) == 4:
        return generator.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
    if len(shape) == 2:
        lengths = generator.uniform(0.5, 2, (shape[0], 1))
        return generator.standard_normal(shape) * np.sqrt(1 / shape[1]) * lengths
    if key.endswith("running_var"):
        return generator.uniform(0.5, 2, shape)
    if key.endswith("running_mean"):
        return 0.3 * generator.standard_normal(shape)
    if key.endswith("bias"):
        return 0.2 * generator.standard_normal(shape)
    return generator.uniform(0.4, 1, shape)


def jax_pair(state: dict) -> tuple[dict, dict]:
    """Parameters and state of DeepMind's JAX code, of the tensors of its PyTorch code."""
    params: dict = {}
    averages: dict = {}
    for name, tensor in state.items():
        layer, _, field = name.rpartition(".")
        place = re.sub(r"layer\.(\d)\.block\.(\d)\.", r"resnet_lay_\1_block_\2/~/", layer)
        module = f"wide_res_net/~/{place}"
        if field.startswith("running"):
            ema = f"{module}/~/{field.removeprefix('running_')}_ema"
            value = tensor.reshape(1, 1, 1, -1)
            averages[ema] = {"counter": np.int32(9), "hidden": value / 2, "average": value}
        elif tensor.ndim == 4:
            params.setdefault(module, {})["w"] = tensor.transpose(2, 3, 1, 0)
        elif layer == "logits":
            params.setdefault(module, {})["w" if tensor.ndim == 2 else "b"] = tensor.T
        elif field != "num_batches_tracked":
            jax_field = {"weight": "scale", "bias": "offset"}[field]
            params.setdefault(module, {})[jax_field] = tensor.reshape(1, 1, 1, -1)
    return params, averages
