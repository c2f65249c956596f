"""The prepared TFDS data sets hold what the published ones hold, in any order of storage."""

import functools
import hashlib

import numpy as np
import pytest

from he_keras import data

pytestmark = pytest.mark.real_data

MNIST_TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

# Counts and means as published; digests of the set of (label, image), blind to its order.
EXPECTED = {
    ("cifar10", "train"): ([5000] * 10, [125.307, 122.950, 113.865], "d59acf989e068e70"),
    ("cifar10", "test"): ([1000] * 10, [126.025, 123.709, 114.854], "899683d46c3a8c66"),
    ("mnist", "train"): (MNIST_TRAIN_COUNTS, [33.318], "3655811c0e122370"),
    ("mnist", "test"): (MNIST_TEST_COUNTS, [33.791], "634538fb34c5277f"),
    ("fashion_mnist", "train"): ([6000] * 10, [72.940], "0c69d5cdeb902b69"),
    ("fashion_mnist", "test"): ([1000] * 10, [73.147], "90c92c0507755a7d"),
}


load_prepared = functools.cache(data.load)


def digest(dataset):
    """Returns a digest of the set of (label, image)."""
    examples = zip(dataset.labels, dataset.images, strict=True)
    rows = [hashlib.sha256(bytes([label]) + image.tobytes()).digest() for label, image in examples]
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16]


@pytest.mark.parametrize(("name", "split"), list(EXPECTED))
def test_prepared_data_set_is_the_published_one(name, split):
    dataset = load_prepared(name, split)
    counts, means, expected_digest = EXPECTED[name, split]
    assert len(dataset) == sum(counts)
    assert dataset.image_shape == data.FACTS[name].image_shape
    assert dataset.class_names == data.FACTS[name].class_names
    np.testing.assert_array_equal(np.bincount(dataset.labels), counts)
    np.testing.assert_allclose(dataset.images.mean(axis=(0, 1, 2)), means, atol=5e-4)
    assert digest(dataset) == expected_digest


def test_cifar10_loads_in_the_same_order():
    first = load_prepared("cifar10", "train")
    again = data.load("cifar10", "train")
    np.testing.assert_array_equal(first.labels, again.labels)
    np.testing.assert_array_equal(first.images, again.images)


def test_cifar10_hold_out_is_a_part_of_train():
    train = load_prepared("cifar10", "train", validation_examples=1000)
    validation = load_prepared("cifar10", "validation", validation_examples=1000)
    assert (len(train), len(validation)) == (49_000, 1000)
    total = train.images.sum(dtype=np.int64) + validation.images.sum(dtype=np.int64)
    assert total == load_prepared("cifar10", "train").images.sum(dtype=np.int64)


def test_cifar10_evaluation_scores_all_ten_thousand():
    test = load_prepared("cifar10", "test")
    labels = np.concatenate([y for _, y in data.eval_pipeline(test, 384)])
    np.testing.assert_array_equal(labels, test.labels)
