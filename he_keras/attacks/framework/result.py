"""What an attack is after, how points are judged by it, and what comes back: `AttackResult`."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from he_keras import losses, refusals
from he_keras.attacks.framework.rows import select_rows


class Score(NamedTuple):
    """What one image's logits say about it; one entry per example in each tensor.

    Attributes:
        broken: the goal is reached: the image is misclassified, or predicted as its target.
        margin: how far the logits are from the goal, see `Goal.margin`.
        finite: no logit is NaN or infinite.
    """

    broken: Any
    margin: Any
    finite: Any


class Goal(NamedTuple):
    """The goal of an attack for each example: any class but the label, or one target class.

    Attributes:
        labels: int tensor `(n,)`, the true classes.
        targets: int tensor `(n,)`, the classes to be predicted; `()` for any class but the label.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.attacks.framework.result import Goal
        >>> logits = tf.constant([[1.0, 3.0, 2.0]])
        >>> label, target = tf.constant([0]), tf.constant([2])
        >>> bool(Goal(label).is_reached(logits)), bool(Goal(label, target).is_reached(logits))
        (True, False)
    """

    labels: Any
    targets: Any = ()

    @classmethod
    def of(cls, labels, targets=None) -> "Goal":
        """Returns the goal; without targets it is any class but the label."""
        return cls(labels, () if targets is None else targets)

    @property
    def is_targeted(self) -> bool:
        """Whether each example has a target."""
        return not isinstance(self.targets, tuple)

    @property
    def classes(self):
        """The classes that the loss is about: the targets, else the labels."""
        return self.targets if self.is_targeted else self.labels

    def is_reached(self, logits, confidence: float = 0.0):
        """True where the prediction is what the attack is after.

        Args:
            logits: the logits. NaN counts as a misclassification, but not as a target.
            confidence: how far the wanted class must lead.
        """
        if confidence:
            size = -confidence if self.is_targeted else confidence
            logits += size * tf.one_hot(self.classes, tf.shape(logits)[-1], dtype=logits.dtype)
        if self.is_targeted:
            return ~is_wrong(logits, self.targets)
        return is_wrong(logits, self.labels)

    def rows(self, rows) -> "Goal":
        """Returns the goal of some examples."""
        return Goal(self.labels[rows], self.targets[rows] if self.is_targeted else ())

    def repeated(self, count) -> "Goal":
        """Returns the goal of examples that are repeated, each `count` times in a row."""
        return tf.nest.map_structure(lambda each: tf.repeat(each, count, axis=0), self)

    def margin(self, logits):
        """How far the logits are from the goal: positive until it is reached.

        Without targets this is the true logit minus the largest other one, with targets the largest
        other logit minus the target's.
        """
        margin = losses.margin(logits, self.classes)
        return -margin if self.is_targeted else margin

    def loss(self, name: str, logits):
        """Returns the loss of this name, which an attack ascends to reach the goal."""
        if self.is_targeted:
            return losses.TARGETED_LOSSES[name](logits, self.labels, self.targets)
        return losses.ATTACK_LOSSES[name](logits, self.labels)

    def score(self, logits, dtype=None) -> Score:
        """Judges logits; `dtype` is that of the margins, by default the logits'."""
        finite = tf.reduce_all(tf.math.is_finite(logits), axis=1)
        margin = self.margin(logits)
        return Score(self.is_reached(logits), tf.cast(margin, dtype or margin.dtype), finite)


def checked_targets(targets, labels: np.ndarray) -> np.ndarray | None:
    """Returns targets as int32, or None; an error where they do not fit the labels."""
    if targets is None:
        return None
    targets = np.asarray(targets)
    if targets.shape != labels.shape or not np.issubdtype(targets.dtype, np.integer):
        raise ValueError(
            f"Invalid targets; expected integers of shape {labels.shape}; "
            f"received dtype={targets.dtype}, shape={targets.shape}"
        )
    if targets.min() < 0 or np.any(targets == labels):
        raise ValueError(
            "Invalid targets; expected classes >= 0 other than the labels; "
            f"received targets={targets!r:.60}"
        )
    return targets.astype(np.int32)


def is_wrong(logits, labels):
    """True where the prediction is not the label; logits that are NaN count as wrong."""
    predictions = tf.argmax(logits, axis=-1, output_type=tf.int32)
    has_nan = tf.reduce_any(tf.math.is_nan(logits), axis=-1)
    # `!=` would lose the static shape where only one side knows the batch size.
    return has_nan | tf.not_equal(predictions, tf.cast(labels, tf.int32))


def other_classes(logits, labels, count: int | None = None):
    """Returns the `count` classes of largest logit except the label, largest first: `(n, count)`.

    Fewer if there are fewer classes; without `count` all of them.
    """
    is_label = tf.one_hot(labels, tf.shape(logits)[1], True, False, dtype=tf.bool)
    # The label comes first in the ranking and is then left out.
    ranked = tf.where(is_label, logits.dtype.max, logits)
    num_classes = logits.shape[1] or tf.shape(logits)[1]
    if count is not None:
        smaller = min if isinstance(num_classes, int) else tf.minimum
        num_classes = smaller(count + 1, num_classes)
    return tf.math.top_k(ranked, k=num_classes).indices[:, 1:]


class Best(NamedTuple):
    """The best point that an attack has seen of each example.

    A point that reaches the goal is better than any that does not. Among equals the stronger one is
    better, and of equally strong ones the earlier.

    Attributes:
        point: what is kept of the best point: a tensor, or several, with one row per example.
        strength: what decides among equals, such as the loss.
        broken: the goal was reached.
    """

    point: Any
    strength: Any
    broken: Any

    @classmethod
    def before(cls, point, images) -> "Best":
        """Returns the record before the first point; `point` stands there until one is seen."""
        rows = tf.shape(images)[:1]
        return cls(point, tf.fill(rows, images.dtype.min), tf.zeros(rows, tf.bool))

    @property
    def distance(self):
        """What a minimum-norm attack has found: its strength is the distance times -1."""
        return tf.where(self.broken, -self.strength, np.inf)

    def updated(self, point, strength, broken, only_broken: bool = False) -> "Best":
        """Returns the record after one more point of each example.

        Args:
            point: the points.
            strength: their strength.
            broken: where they reach the goal.
            only_broken: points that do not reach the goal are passed over.
        """
        strength = tf.cast(strength, self.strength.dtype)
        if only_broken:
            strength = tf.where(broken, strength, strength.dtype.min)
        is_better = tf.where(tf.equal(self.broken, broken), strength > self.strength, broken)
        return Best(
            point=select_rows(is_better, point, self.point),
            strength=tf.where(is_better, strength, self.strength),
            broken=self.broken | broken,
        )


class Crafted(NamedTuple):
    """What `Attack.run` returns for one batch.

    Attributes:
        x_adv: adversarial images; the framework projects them into the ball.
        forward_passes: int tensor `(n,)`, passes through the network for each example.
        backward_passes: int tensor `(n,)`, gradient passes for each example.
        distance: of minimum-norm attacks only: the length of the perturbation of `x_adv`, infinite
            where no adversarial image was found.
        score: that of `x_adv`, from an attack that has seen its logits and has projected it itself.
            With None the framework projects and scores it, which costs a forward pass.
    """

    x_adv: Any
    forward_passes: Any = None
    backward_passes: Any = None
    distance: Any = None
    score: Score | None = None


def check_crafted(crafted, images, attack: str, needs_distance: bool) -> None:
    """Raises a ValueError unless an attack has returned what `Crafted` asks for.

    Args:
        crafted: what `run` returned.
        images: the images that it got.
        attack: the attack's name.
        needs_distance: whether it is a minimum-norm attack.
    """
    if not isinstance(crafted, Crafted):
        raise ValueError(
            f"The attack {attack!r} returned no result; expected attacks.Crafted(x_adv, "
            f"forward_passes, backward_passes) from run(); received {type(crafted).__name__}"
        )
    for field in ("forward_passes", "backward_passes", *(["distance"] if needs_distance else [])):
        value = getattr(crafted, field)
        if value is None or tf.convert_to_tensor(value).shape.rank not in (1, None):
            raise ValueError(
                f"The attack {attack!r} forgets a field of its result; expected {field} as a tensor"
                f" of shape (n,), one number for each image; received {field}={value!r:.60}"
            )
    x_adv = crafted.x_adv
    if not tf.is_tensor(x_adv) or x_adv.dtype != images.dtype:
        kind = x_adv.dtype.name if tf.is_tensor(x_adv) else type(x_adv).__name__
        raise ValueError(
            f"The attack {attack!r} returned no images; expected x_adv as a tensor of dtype "
            f"{images.dtype.name}, as it got them; received {kind}"
        )
    if not x_adv.shape.is_compatible_with(images.shape):
        raise ValueError(
            f"The attack {attack!r} changed the shape of the images; expected {images.shape}; "
            f"received x_adv of shape {x_adv.shape}"
        )


def checked_values(crafted: Crafted, images, attack: str) -> Crafted:
    """Returns the result of an attack of one's own; its numbers are checked when it runs.

    Args:
        crafted: what `run` returned.
        images: the images that it got.
        attack: the attack's name.
    """
    name = f"The attack {attack!r}"
    x_adv = refusals.only_finite(crafted.x_adv, f"{name} returned NaN or infinity in x_adv")
    for field in ("x_adv", "forward_passes", "backward_passes"):
        message = f"{name} returned too few or too many {field}"
        rows = tf.convert_to_tensor(getattr(crafted, field))
        x_adv = refusals.one_for_each(rows, images, x_adv, message)
    return crafted._replace(x_adv=x_adv)


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """The outcome of an attack, one entry per example, as NumPy arrays.

    Attributes:
        x_adv: adversarial images, inside the ball and the bounds. It is the clean image where the
            example was misclassified from the start and `stop_when_broken` is on.
        success: the model misclassifies `x_adv`; with targets, it predicts the target.
        margin: true logit minus the largest other one at `x_adv`; with targets, the largest other
            logit minus the target's.
        forward_passes: forward passes spent, scoring included.
        backward_passes: input-gradient passes spent.
        non_finite: the model returned NaN or infinity for the clean or the adversarial image.
        distance: length of the perturbation in the threat model's norm. For minimum-norm attacks
            (FAB, DeepFool, C&W, RayS) that of `x_nearest`: it may exceed epsilon, and is infinite
            where no adversarial image was found.
        x_nearest: for minimum-norm attacks the nearest adversarial image found, whatever epsilon
            (the clean image where there is none); for all others `x_adv`.
        warnings: what makes the result doubtful, each a sentence.
    """

    x_adv: np.ndarray
    success: np.ndarray
    margin: np.ndarray
    forward_passes: np.ndarray
    backward_passes: np.ndarray
    non_finite: np.ndarray
    distance: np.ndarray
    x_nearest: np.ndarray
    warnings: tuple[str, ...] = ()

    @property
    def robust_accuracy(self) -> float:
        """Share of all examples that are still classified correctly."""
        return float(1.0 - self.success.mean())


_FIELDS = tuple(
    field.name for field in dataclasses.fields(AttackResult) if field.name != "warnings"
)
_COUNTS = ("forward_passes", "backward_passes")


def concatenate(parts: list[AttackResult]) -> AttackResult:
    """Joins the results of consecutive batches."""
    columns: dict[str, Any] = {}
    shares_images = all(part.x_nearest is part.x_adv for part in parts)
    for name in _FIELDS:
        if name == "x_nearest" and shares_images:
            columns[name] = columns["x_adv"]
        else:
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
    return AttackResult(**columns)


def copied(result: AttackResult) -> AttackResult:
    """A copy whose arrays may be written to."""
    columns: dict[str, Any] = {name: np.array(getattr(result, name)) for name in _FIELDS}
    if result.x_nearest is result.x_adv:
        columns["x_nearest"] = columns["x_adv"]
    return AttackResult(**columns)


def merge(best: AttackResult, again: AttackResult, rows: np.ndarray, by_distance: bool) -> None:
    """Takes over into `best`, for each of `rows`, what `again` did better; adds up the passes.

    Better is: misclassified; else, or among equals, the smaller margin (or distance).
    """
    measure = "distance" if by_distance else "margin"
    earlier = getattr(best, measure)[rows]
    broke, had_broken = again.success, best.success[rows]
    nearer = (broke == had_broken) & (getattr(again, measure) < earlier)
    better = nearer | (broke & ~had_broken)
    for name in _FIELDS:
        if name in _COUNTS:
            getattr(best, name)[rows] += getattr(again, name)
        elif not (name == "x_nearest" and best.x_nearest is best.x_adv):
            getattr(best, name)[rows[better]] = getattr(again, name)[better]
