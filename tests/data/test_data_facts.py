"""Facts about the known data sets, and synthetic images in their shapes."""

import numpy as np
import pytest

from he_keras import data
from he_keras.data import augmentation


def test_default_augmentations():
    expected = {
        "cifar10": "crop-flip",
        "cifar100": "crop-flip",
        "imagenet2012": "resized-crop-flip",
        "digits": "none",
        "mnist": "none",
        "fashion_mnist": "none",
        "arrays": "none",
    }
    assert {name: data.default_augmentation(name) for name in expected} == expected


@pytest.mark.parametrize("name", list(data.FACTS))
def test_facts_are_consistent(name):
    facts = data.FACTS[name]
    assert facts.augmentation in augmentation.AUGMENTATIONS
    assert facts.class_names is None or len(set(facts.class_names)) == facts.num_classes
    dataset = data.synthetic(name, num_examples=3)
    assert (dataset.name, dataset.image_shape) == (name, facts.image_shape)
    assert dataset.num_classes == facts.num_classes


def test_synthetic_images_depend_on_their_class_and_seeds_share_the_classes():
    train = data.synthetic((9, 7, 2), num_classes=5, num_examples=200, seed=0)
    test = data.synthetic((9, 7, 2), num_classes=5, num_examples=103, seed=1, split="test")
    assert (test.split, test.images.dtype, test.images.shape) == ("test", np.uint8, (103, 9, 7, 2))
    assert np.bincount(test.labels).tolist() == [21, 21, 21, 20, 20]
    centres = np.stack([train.images[train.labels == c].mean(axis=0) for c in range(5)])
    distances = ((test.images[:, None] - centres[None]) ** 2.0).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == test.labels).mean() > 0.99
    again = data.synthetic((9, 7, 2), num_classes=5, num_examples=200, seed=0)
    np.testing.assert_array_equal(train.images, again.images)


def test_synthetic_arguments():
    with pytest.raises(ValueError, match="Invalid num_classes; expected an integer >= 1.*None"):
        data.synthetic((8, 8, 1))
    with pytest.raises(ValueError, match="Unknown data set"):
        data.synthetic("cifar")
