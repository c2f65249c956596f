"""Whether an imported model has the published accuracy on the first test images."""

from typing import Any, NamedTuple

import numpy as np

from he_keras.data import eval_pipeline
from he_keras.evaluation.statistics import chance_of_at_least

#: Chosen: a wrong model is far from its published accuracy on so few images too.
NUM_EXAMPLES = 200
#: How rarely chance takes a right model so far below, or above, its published accuracy.
_LEVEL = 1e-4


class CleanCheck(NamedTuple):
    """A measured accuracy and the published one.

    Attributes:
        num_correct: how many images the model gets right.
        num_examples: how many images it was asked about.
        published: the published accuracy in percent, or None.
    """

    num_correct: int
    num_examples: int
    published: float | None

    @property
    def looks_right(self) -> bool:
        """Whether chance explains the difference to the published accuracy."""
        if self.published is None:
            return True
        share = self.published / 100
        wrong = self.num_examples - self.num_correct
        return (
            chance_of_at_least(self.num_correct, self.num_examples, share) >= _LEVEL
            and chance_of_at_least(wrong, self.num_examples, 1 - share) >= _LEVEL
        )

    def summary(self) -> str:
        """Returns one sentence."""
        published = "none" if self.published is None else f"{self.published:.2f} %"
        text = (
            f"Clean accuracy on the first {self.num_examples} test images: "
            f"{self.num_correct / self.num_examples:.1%}; published on all: {published}."
        )
        return text if self.looks_right else f"{text} This does not look like the published model."


def check_clean(model: Any, dataset: Any, published: float | None = None) -> CleanCheck:
    """Measures the clean accuracy of a model on the first 200 images of a data set.

    Args:
        model: a callable from images to logits.
        dataset: the test images, a data set of `he_keras.data`.
        published: the published accuracy in percent, or None.

    Example:
        >>> import he_keras as he
        >>> import tensorflow as tf
        >>> model = lambda images: tf.reshape(images, [-1, 64])[:, :10]
        >>> check = he.zoo.check_clean(model, he.data.load("digits", "test"), published=98.0)
        >>> check.num_examples, check.looks_right
        (200, False)
    """
    correct = [
        np.argmax(np.asarray(model(images)), axis=1) == np.asarray(labels)
        for images, labels in eval_pipeline(dataset, 50, limit=NUM_EXAMPLES)
    ]
    answers = np.concatenate(correct)
    return CleanCheck(int(answers.sum()), len(answers), published)
