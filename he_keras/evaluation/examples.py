"""The examples of an evaluation, as checked batches in a fixed order."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim, check_examples
from he_keras.attacks.attack import is_wrong
from he_keras.attacks.checks import check_class_numbers
from he_keras.data import StreamingDataset, eval_pipeline
from he_keras.threat import ThreatModel


class Examples:
    """Arrays, a data set of `he_keras.data` or a `tf.data.Dataset`, read as often as needed."""

    def __init__(self, threat: ThreatModel, examples, batch_size: int) -> None:
        self.threat = threat
        self.batch_size = batch_size
        if isinstance(examples, StreamingDataset):
            examples = eval_pipeline(examples, batch_size)
        if not isinstance(examples, tf.data.Dataset):
            arrays = examples.as_float() if hasattr(examples, "as_float") else examples
            examples = check_examples(threat, *arrays)
        self._source = examples

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if isinstance(self._source, tf.data.Dataset):
            for images, labels in self._source.as_numpy_iterator():
                yield check_examples(self.threat, images, labels)
            return
        images, labels = self._source
        for first in range(0, len(labels), self.batch_size):
            rows = slice(first, first + self.batch_size)
            yield images[rows], labels[rows]

    def first(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first examples, or all if there are fewer."""
        parts: list = []
        for images, labels in self:
            parts.append((images, labels))
            if sum(len(part[1]) for part in parts) >= count:
                break
        images, labels = (np.concatenate(column)[:count] for column in zip(*parts, strict=True))
        return images, labels

    def chosen(self, mask: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields full batches (positions, images, labels) of the examples where `mask` is True."""
        waiting: list[tuple[np.ndarray, ...]] = []
        position = count = 0
        for images, labels in self:
            positions = np.arange(position, position + len(labels))
            position += len(labels)
            rows = mask[positions]
            if not rows.any():
                continue
            waiting.append((positions[rows], images[rows], labels[rows]))
            count += int(rows.sum())
            while count >= self.batch_size:
                columns = [np.concatenate(column) for column in zip(*waiting, strict=True)]
                yield tuple(column[: self.batch_size] for column in columns)
                waiting = [tuple(column[self.batch_size :] for column in columns)]
                count -= self.batch_size
        if count:
            yield tuple(np.concatenate(column) for column in zip(*waiting, strict=True))


def classify(victim: Victim, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Returns all labels, and whether each clean image is classified correctly.

    What does not fit together shows here, before any attack.
    """
    predict, num_classes = None, 0
    labels, correct = [], []
    for images, some_labels in examples:
        if predict is None:
            num_classes = victim.logits(tf.constant(images[:1])).shape[-1]
            predict = tf.function(
                lambda images, labels: ~is_wrong(victim.logits(images), labels),
                input_signature=[
                    tf.TensorSpec([None, *images.shape[1:]], images.dtype),
                    tf.TensorSpec([None], tf.int32),
                ],
            )
        check_class_numbers(some_labels, num_classes)
        labels.append(some_labels)
        correct.append(predict(tf.constant(images), tf.constant(some_labels, tf.int32)).numpy())
    if not labels:
        raise ValueError("No examples; expected at least one; received 0")
    return np.concatenate(labels), np.concatenate(correct)
