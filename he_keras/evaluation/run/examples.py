"""The examples of an evaluation, in a fixed order, and the one function that scores them."""

import hashlib
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim, check_examples
from he_keras.attacks.framework.agreement import agreed, probe
from he_keras.attacks.framework.result import Goal
from he_keras.attacks.framework.victim import check_class_numbers, check_logits
from he_keras.data import ImageDataset, StreamingDataset, eval_pipeline
from he_keras.data.augmentation import to_unit_float
from he_keras.data.datasets import class_numbers
from he_keras.status_line import StatusLine
from he_keras.threat import ThreatModel

#: A digest begins so if it depends on images and labels alone. Earlier ones depended on batches.
PREFIX = "sha256:"


class Block(NamedTuple):
    """Consecutive examples that are evaluated together, by number of the block."""

    number: int
    positions: np.ndarray
    images: np.ndarray
    labels: np.ndarray


class Examples:
    """Arrays, a data set of `he_keras.data` or a `tf.data.Dataset`, read as often as needed.

    Data sets of `he_keras.data` are brought from [0, 1] to the bounds of the threat model. All
    other images must already lie within the bounds.
    """

    def __init__(self, threat: ThreatModel, examples, batch_size: int) -> None:
        self.threat = threat
        self.batch_size = batch_size
        self.class_names = tuple(getattr(examples, "class_names", None) or ())
        if isinstance(examples, StreamingDataset):
            stream = eval_pipeline(examples, batch_size)
            examples = stream.map(lambda images, labels: (threat.from_unit(images), labels))
        if not isinstance(examples, (tf.data.Dataset, ImageDataset)):
            examples = check_examples(threat, *_accepted(threat, *examples))
        self._source = examples

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if isinstance(self._source, tf.data.Dataset):
            for images, labels in self._source.as_numpy_iterator():
                yield check_examples(self.threat, images, labels)
            return
        for first in range(0, len(self), self.batch_size):
            yield self._rows(np.arange(first, min(first + self.batch_size, len(self))))

    def __len__(self) -> int:
        """Number of examples; a `tf.data.Dataset` that does not know it is read for that."""
        if not isinstance(self._source, tf.data.Dataset):
            return len(self._source if isinstance(self._source, ImageDataset) else self._source[1])
        return sum(len(labels) for _, labels in self._source.as_numpy_iterator())

    def _rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self._source, ImageDataset):
            # Batch by batch, because all images as floats would take four times the memory.
            images, labels = self._source.subset(rows).as_float()
            return check_examples(self.threat, self.threat.from_unit(images), labels)
        images, labels = self._source
        # Slices are no copies.
        chosen = slice(rows[0], rows[-1] + 1)
        return images[chosen], labels[chosen]

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


def positions_of(count: int, block_size: int, shard: tuple[int, int] | None) -> np.ndarray:
    """Returns the positions of a shard's examples among so many; without a shard, all.

    Example:
        >>> from he_keras.evaluation.run.examples import positions_of
        >>> positions_of(5, 2, (0, 2)).tolist()
        [0, 1, 4]
    """
    index, shards = shard or (0, 1)
    return np.flatnonzero(np.arange(count) // block_size % shards == index)


def _block(number: int, block_size: int, images, labels) -> Block:
    positions = np.arange(number * block_size, number * block_size + len(labels))
    return Block(number, positions, images, labels)


def _accepted(threat: ThreatModel, images, labels) -> tuple:
    """Arrays as people have them: uint8 images and one-hot labels too, which is said once."""
    if getattr(images, "dtype", None) == np.uint8:
        warnings.warn("uint8 images: divided by 255.", stacklevel=4)
        images = threat.from_unit(to_unit_float(images).numpy())
    return images, class_numbers(labels)


class Scored(NamedTuple):
    """One entry per image in each array.

    Attributes:
        prediction: the class of the largest logit; -1 where a logit is NaN.
        wrong: the prediction is not the label.
        margin: true logit minus the largest other one.
    """

    prediction: np.ndarray
    wrong: np.ndarray
    margin: np.ndarray


class Scorer:
    """Scores images with a model, in a function that is traced once for every batch size.

    The model is probed before the first batch. Where attacks take the plain path, so does this.

    Example:
        >>> import numpy as np
        >>> from he_keras.evaluation.run.examples import Scorer
        >>> scorer = Scorer(lambda images: images)
        >>> scorer(np.array([[0.25, 0.5]], "float32"), np.array([0])).prediction.tolist()
        [1]
    """

    def __init__(self, model) -> None:
        self._victim = Victim(model)
        self._compiled = tf.function(self._score)
        self._num_classes = 0

    def num_classes(self, images: np.ndarray) -> int:
        """Returns how many classes there are; the first time the model sees 8 images for that."""
        if not self._num_classes:
            model = self._victim.model
            self._victim, _ = agreed(model, images)
            found = probe(model, images)
            check_logits(found.logits, len(found.images), model)
            self._num_classes = found.logits.shape[1]
        return self._num_classes

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> Scored:
        """Scores one batch."""
        self.num_classes(images)
        function = self._compiled.get_concrete_function(
            tf.TensorSpec([None, *images.shape[1:]], images.dtype), tf.TensorSpec([None], tf.int32)
        )
        scored = function(tf.constant(images), tf.constant(labels, tf.int32))
        return Scored(*(column.numpy() for column in scored))

    def _score(self, images, labels):
        logits = self._victim.for_many_passes().logits(images)
        has_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
        prediction = tf.where(has_nan, -1, tf.argmax(logits, axis=-1, output_type=tf.int32))
        scored = Goal(labels).score(logits)
        return prediction, scored.broken, scored.margin


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


class DataDigest:
    """A digest of images and labels that is the same whatever batches they come in.

    Example:
        >>> import numpy as np
        >>> from he_keras.evaluation.run.examples import DataDigest
        >>> images, labels = np.ones((2, 3), "float32"), np.array([0, 1])
        >>> at_once, in_turn = DataDigest(), DataDigest()
        >>> at_once.update(images, labels)
        >>> for row in range(2):
        ...     in_turn.update(images[row : row + 1], labels[row : row + 1])
        >>> at_once.text() == in_turn.text()
        True
    """

    def __init__(self) -> None:
        self._images, self._labels = hashlib.sha256(), hashlib.sha256()
        self._kind = ""

    def update(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Adds a batch."""
        self._kind = f"{images.dtype} {images.shape[1:]}"
        self._images.update(np.ascontiguousarray(images).data)
        self._labels.update(np.asarray(labels, np.int32).tobytes())

    def text(self) -> str:
        """Returns the digest."""
        parts = (self._kind, self._images.hexdigest(), self._labels.hexdigest())
        return PREFIX + hashlib.sha256(" ".join(parts).encode()).hexdigest()


def classify(scorer: Scorer, examples: Examples, show_progress: bool = False) -> Clean:
    """Scores every clean image; if model and data do not fit, this fails before any attack."""
    digest = DataDigest()
    labels, scores, done = [], [], 0
    total = len(examples) if show_progress else 0
    with StatusLine("clean images", show_progress, last_line=False) as line:
        for images, some_labels in examples:
            check_class_numbers(some_labels, scorer.num_classes(images))
            digest.update(images, some_labels)
            labels.append(some_labels)
            scores.append(scorer(images, some_labels))
            done += len(some_labels)
            line.count(done, total, f"{done:,} of {total:,}")
    if not labels:
        raise ValueError("No examples; expected at least one; received 0")
    scored = Scored(*(np.concatenate(column) for column in zip(*scores, strict=True)))
    num_classes = scorer.num_classes(images)
    return Clean(np.concatenate(labels), scored, digest.text(), num_classes)
