"""The facts about the named datasets, in one table.

All class counts, shapes, split names and default augmentations come from here. The class names of
cifar100 and imagenet2012 come from the prepared dataset, which stores them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DatasetFacts:
    """Facts about one named dataset.

    Args:
        num_classes: Number of classes.
        image_shape: (height, width, channels) as the pipelines deliver images.
        augmentation: Name of the usual training augmentation.
        class_names: One name per class, or None if the prepared dataset has them.
        test_split: The TFDS split that serves as the test set. ImageNet's test labels are not
            public, so everyone tests on its 50,000 validation images.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    augmentation: str
    class_names: tuple[str, ...] | None = None
    test_split: str = "test"


_DIGIT_NAMES = tuple(str(digit) for digit in range(10))

FACTS: dict[str, DatasetFacts] = {
    "digits": DatasetFacts(10, (8, 8, 1), "none", _DIGIT_NAMES),
    "mnist": DatasetFacts(10, (28, 28, 1), "none", _DIGIT_NAMES),
    "fashion_mnist": DatasetFacts(
        10,
        (28, 28, 1),
        "none",
        (
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
    "cifar10": DatasetFacts(
        10,
        (32, 32, 3),
        "crop-flip",
        (
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
    ),
    "cifar100": DatasetFacts(100, (32, 32, 3), "crop-flip"),
    "imagenet2012": DatasetFacts(1000, (224, 224, 3), "resized-crop-flip", test_split="validation"),
}


def default_augmentation(name: str) -> str:
    """Returns the usual training augmentation of a dataset.

    Args:
        name: A dataset's name (`dataset.name`).

    Returns:
        "crop-flip" for cifar10 and cifar100, "resized-crop-flip" for imagenet2012, and "none" for
        everything else: digits change meaning when mirrored, and of a user's own images nothing
        is known.

    Example:
        >>> import he_keras as he
        >>> he.data.default_augmentation("cifar10")
        'crop-flip'
    """
    return FACTS[name].augmentation if name in FACTS else "none"
