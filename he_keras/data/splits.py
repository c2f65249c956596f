"""Divides a source without splits of its own, and holds out training examples.

Both divisions are the same in every run, on every machine and for every training seed. So training,
searches, resumed runs and evaluations use the same splits. They are drawn by `RandomState`, because
NumPy guarantees that its stream never changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from he_keras.arguments import check_choice, is_integer, is_number
from he_keras.data import datasets

SPLITS = ("train", "test", "validation", "all")
# Any numbers would do, but they must never change: the splits depend on them.
_HOLD_OUT_SEED = 20200219
_TEST_SEED = 20201119


def check(split: str, validation_examples: Any, test_fraction: Any) -> None:
    """Raises a ValueError if there is no such split, or if a share of it is illegal."""
    check_choice("split", split, SPLITS)
    if (
        not is_integer(validation_examples)
        or validation_examples < 0
        or (validation_examples and split == "all")
    ):
        raise ValueError(
            "illegal number of held-out examples; expected 0 or more, and 0 with split='all'; "
            f"received validation_examples={validation_examples!r}, split={split!r}"
        )
    if (
        not is_number(test_fraction)
        or not 0 <= test_fraction < 1
        or (test_fraction and split == "all")
    ):
        raise ValueError(
            "illegal share of test examples; expected at least 0 and below 1, and 0 with "
            f"split='all'; received test_fraction={test_fraction!r}, split={split!r}"
        )


def chosen(dataset: datasets.AnyDataset, split: str, test_fraction: float) -> datasets.AnyDataset:
    """Returns a source's split, or the part of that name if the source is one set.

    The test examples are spread evenly over the classes. A fixed permutation is sorted stably by
    class, and the share `test_fraction` is taken from every stretch of it.
    """
    if dataset.split == split:
        if test_fraction:
            raise ValueError(
                f"{dataset.name} has splits of its own; expected test_fraction=0; received "
                f"test_fraction={test_fraction}"
            )
        return dataset
    if split == "validation":
        raise ValueError(
            f"{dataset.name} is one set without splits; expected validation_examples > 0 for "
            "split='validation'; received validation_examples=0"
        )
    if not test_fraction:
        if split == "test":
            raise ValueError(
                f"{dataset.name} is one set without splits, which training may have seen; expected "
                "test_fraction as in training, or images that are marked: arrays images_test and "
                "labels_test, or a folder test/<class>; received split='test'"
            )
        return dataclasses.replace(dataset, split=split)
    is_test = _is_test(_labels(dataset), test_fraction)
    if not is_test.any():
        raise ValueError(
            f"{dataset.name} is too small to split; expected test_fraction of at least "
            f"1/{len(dataset)}; received test_fraction={test_fraction}"
        )
    positions = np.flatnonzero(is_test if split == "test" else ~is_test)
    return dataclasses.replace(dataset.subset(positions), split=split)


def hold_out(
    dataset: datasets.AnyDataset, split: str, validation_examples: int
) -> datasets.AnyDataset:
    """Returns "train" without the held-out examples, or these examples as "validation"."""
    num_examples = len(dataset)
    if validation_examples >= num_examples:
        raise ValueError(
            f"too many held-out examples; expected fewer than the {num_examples} training "
            f"examples; received validation_examples={validation_examples}"
        )
    order = np.random.RandomState(_HOLD_OUT_SEED).permutation(num_examples)
    train, validation = np.split(order, [num_examples - validation_examples])
    positions = np.sort(train if split == "train" else validation)
    return dataclasses.replace(dataset.subset(positions), split=split)


def _is_test(labels: np.ndarray, test_fraction: float) -> np.ndarray:
    order = np.random.RandomState(_TEST_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    counts = [math.floor(number * test_fraction) for number in range(len(labels) + 1)]
    is_test = np.zeros(len(labels), bool)
    is_test[order] = np.diff(counts) > 0
    return is_test


def _labels(dataset: datasets.AnyDataset) -> np.ndarray:
    if isinstance(dataset, datasets.ImageDataset):
        return dataset.labels
    return dataset.source.labels
