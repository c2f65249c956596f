"""The published corrupted images: the .npy files of CIFAR-10-C, or the same prepared by TFDS.

Everything that can be checked without reading the pixels is checked when a set is opened.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from he_keras.data import datasets, sources
from he_keras.data.corruptions.registry import SEVERITIES

# TFDS has other names for two corruptions.
_TFDS_NAMES = {"glass_blur": "frosted_glass_blur", "elastic_transform": "elastic"}


class NpyFiles:
    """A folder with labels.npy and one .npy file named after each corruption.

    Each file has uint8 images: n of severity 1, the same n of severity 2, and so on. labels.npy has
    the n labels five times. CIFAR-10-C and CIFAR-100-C are published like this, with n = 10,000.

    Args:
        folder: the folder of the files.
        names: the corruptions that will be read.
    """

    def __init__(self, folder: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.folder = pathlib.Path(folder).expanduser()
        self.description = f"published files in {self.folder.name}"
        self._labels = self._open_labels()
        self._images = {name: self._open_images(name) for name in names}

    def read(self, name: str, severity: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images, which stay on disk until they are used, and the labels."""
        count = len(self._labels)
        return self._images[name][(severity - 1) * count : severity * count], self._labels

    def _open_labels(self) -> np.ndarray:
        labels = _open_array(self.folder, "labels.npy")
        is_row = labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) > 0
        if not is_row or len(labels) % len(SEVERITIES):
            raise ValueError(
                "labels.npy does not hold labels of the benchmark; expected a row of integers, the "
                f"same block for each of {len(SEVERITIES)} severities; received "
                f"shape={labels.shape}, dtype={labels.dtype} in {self.folder}"
            )
        blocks = labels.reshape(len(SEVERITIES), -1).astype(np.int64)
        if (blocks != blocks[0]).any() or blocks.min() < 0:
            raise ValueError(
                "labels.npy does not repeat; expected the same labels >= 0 in each of "
                f"{len(SEVERITIES)} blocks, one for each severity; received others in {self.folder}"
            )
        return blocks[0]

    def _open_images(self, name: str) -> np.ndarray:
        images = _open_array(self.folder, f"{name}.npy")
        shape, count = images.shape, len(SEVERITIES) * len(self._labels)
        if images.dtype != np.uint8 or len(shape) != 4 or shape[0] != count or shape[3] != 3:
            raise ValueError(
                f"{name}.npy does not fit labels.npy; expected uint8 of shape ({count}, height, "
                f"width, 3), {len(self._labels)} images for each severity; received shape={shape}, "
                f"dtype={images.dtype} in {self.folder}"
            )
        return images


def _open_array(folder: pathlib.Path, file_name: str) -> np.ndarray:
    """Opens an array without reading it; a file that is cut short is noticed all the same."""
    path = folder / file_name
    if not path.is_file():
        raise ValueError(
            "A file of the benchmark is missing; expected a folder with labels.npy and one .npy "
            f"file named after each corruption (CIFAR-10-C as published); received no {path}"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{file_name} cannot be read; expected a complete .npy file of plain numbers; received "
            f"{path} ({error})"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{file_name} is no .npy file; expected one array; received {path}")
    return array


class TfdsConfigurations:
    """The data set cifar10_corrupted as TFDS prepares it: one configuration for each pair.

    Args:
        data_dir: folder of prepared data sets. Defaults to $TFDS_DATA_DIR, else
            ~/tensorflow_datasets.
        keys: the pairs (corruption, severity) that will be read.
    """

    description = "cifar10_corrupted of TFDS"

    def __init__(
        self, data_dir: str | os.PathLike[str] | None, keys: Sequence[tuple[str, int]]
    ) -> None:
        root = pathlib.Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
        root = root.expanduser() / "cifar10_corrupted"
        missing = []
        self._folders: dict[tuple[str, int], pathlib.Path] = {}
        for name, severity in keys:
            configuration = f"{_TFDS_NAMES.get(name, name)}_{severity}"
            folder = sources.prepared_folder(root / configuration)
            if folder is None:
                missing.append(configuration)
            else:
                self._folders[name, severity] = folder
        if missing:
            raise ValueError(
                "cifar10_corrupted is not prepared, and he_keras never downloads; expected "
                f"{root / missing[0] / '<version>'}/ with dataset_info.json, features.json and "
                f"TFRecord files (tfds build cifar10_corrupted/{missing[0]}); received "
                f"{len(missing)} of {len(keys)} configurations missing"
            )

    def read(self, name: str, severity: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads the images and the labels."""
        folder = self._folders[name, severity]
        dataset = sources.read_tfds(folder, "test")
        if not isinstance(dataset, datasets.ImageDataset):
            raise ValueError(
                "cifar10_corrupted does not fit into memory; expected images of 32 x 32 pixels; "
                f"received {folder}"
            )
        return dataset.images, dataset.labels
