"""The examples of an evaluation, as checked batches in a fixed order."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import check_examples
from he_keras.attacks.checks import check_class_numbers
from he_keras.data import StreamingDataset, eval_pipeline
from he_keras.evaluation.scoring import Scored, Scorer
from he_keras.threat import ThreatModel


class Block(NamedTuple):
    """Consecutive examples that are evaluated together, by number of the block."""

    number: int
    positions: np.ndarray
    images: np.ndarray
    labels: np.ndarray


class Examples:
    """Arrays, a data set of `he_keras.data` or a `tf.data.Dataset`, read as often as needed."""

    def __init__(self, threat: ThreatModel, examples, batch_size: int) -> None:
        self.threat = threat
        self.batch_size = batch_size
        self.class_names = tuple(getattr(examples, "class_names", None) or ())
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

    def at(self, positions) -> np.ndarray:
        """Returns the images at some positions, in the order of these."""
        wanted = {int(position): None for position in positions}
        begin = 0
        shape: tuple = (0,)
        for images, labels in self:
            shape = images.shape[1:]
            for position in wanted:
                if begin <= position < begin + len(labels):
                    wanted[position] = images[position - begin]
            begin += len(labels)
        return np.array([wanted[int(position)] for position in positions]).reshape(-1, *shape)

    def blocks(self, block_size: int, shard: tuple[int, int] | None) -> Iterator[Block]:
        """Yields the examples in blocks; of a shard `(i, n)` every n-th block from the i-th on."""
        index, count = shard or (0, 1)
        number = 0
        for block in self._all_blocks(block_size):
            if number % count == index:
                yield block
            number += 1

    def _all_blocks(self, block_size: int) -> Iterator[Block]:
        waiting: list[tuple[np.ndarray, np.ndarray]] = []
        number = count = 0
        for images, labels in self:
            waiting.append((images, labels))
            count += len(labels)
            while count >= block_size:
                images, labels = (np.concatenate(column) for column in zip(*waiting, strict=True))
                yield _block(number, block_size, images[:block_size], labels[:block_size])
                waiting = [(images[block_size:], labels[block_size:])]
                count -= block_size
                number += 1
        if count:
            images, labels = (np.concatenate(column) for column in zip(*waiting, strict=True))
            yield _block(number, block_size, images, labels)


def _block(number: int, block_size: int, images, labels) -> Block:
    positions = np.arange(number * block_size, number * block_size + len(labels))
    return Block(number, positions, images, labels)


class Clean(NamedTuple):
    """All labels, what the model says about the clean images, and a digest of images and labels."""

    labels: np.ndarray
    scored: Scored
    digest: str
    num_classes: int

    def first(self, count: int) -> "Clean":
        """Returns the first examples."""
        scored = Scored(*(column[:count] for column in self.scored))
        return Clean(
            self.labels[:count], scored, f"first {count} of {self.digest}", self.num_classes
        )


def classify(scorer: Scorer, examples: Examples) -> Clean:
    """Scores every clean image. What does not fit together shows here, before any attack."""
    digest = hashlib.sha256()
    labels, scores = [], []
    for images, some_labels in examples:
        check_class_numbers(some_labels, scorer.num_classes(images))
        digest.update(images.tobytes())
        digest.update(some_labels.astype(np.int32).tobytes())
        labels.append(some_labels)
        scores.append(scorer(images, some_labels))
    if not labels:
        raise ValueError("No examples; expected at least one; received 0")
    scored = Scored(*(np.concatenate(column) for column in zip(*scores, strict=True)))
    num_classes = scorer.num_classes(images)
    return Clean(np.concatenate(labels), scored, digest.hexdigest(), num_classes)
