"""Feature attack: moves an image's features towards those of images of other classes."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.arguments import check_positive_integer, parse_epsilon
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.gradients import image_gradient, usable
from he_keras.attacks.framework.result import AttackResult, Crafted, is_wrong
from he_keras.attacks.framework.rows import iterate, select_rows
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.multi_targeted import Runs
from he_keras.attacks.registry import register
from he_keras.balls import draw_per_seed, seeds_of_target, uniform
from he_keras.threat import ThreatModel, check_examples, checked_start

#: Smallest product of two lengths in a cosine: the value of the released code.
_LENGTHS_FLOOR = 1e-6


class _TargetRun(NamedTuple):
    """State of the runs of some copies: `copies` has shape (n, targets at once, ...)."""

    copies: Any
    found: Runs


@keras.saving.register_keras_serializable(package="he_keras")
@register("feature", budget="num_steps")
class FeatureAttack(Attack):
    """Descends the cosine distance to the features of images with other labels.

    For each target image t a copy of the attacked image descends
    `max(1 - cos(phi(x'), phi(t)), 0)`. Here phi is the input of the classifier's head. The attack
    succeeds if any copy is misclassified on its way. The loss depends neither on the length of the
    features nor on the head.

    The targets of an example are drawn with replacement from the images with another label among
    the target images: those given here or to `use_targets`, else the examples of the call. Draws
    depend on the seed, the example's number and the set of target images, but not on the batch
    size. To attack a data set in parts, give the target images.

    Paper: none; the code is github.com/Line290/FeatureAttack, and the HE paper (Pang et al. 2020)
        has a column for it in its Table 2, without its settings.
    Assumes: a model with features before its head, and useful gradients of these.
    Cost: `num_targets * (num_steps + 2)` forward and `num_targets * num_steps` backward passes: one
        forward pass for each target image, one that scores each last iterate.
    Deviations: from the released code. The last iterate is scored too: the released loop ends with
        a step that it never checks. Targets are tried `targets_at_once` at a time, 1 by default, so
        that memory stays that of one batch. The released code tries 100 at once, which changes only
        when a search ends. By default the iterate with the smallest margin is returned where none
        is misclassified.

    Args:
        threat: the threat model.
        num_steps: steps towards each target.
        step_size: length of a step; default epsilon / 8 (released: 1/255 at 8/255).
        num_targets: targets for each example. The released settings are 200 to 500.
        targets_at_once: copies of an example that run side by side; it divides `num_targets`.
        random_start: see `ProjectedGradient`; each copy draws its own start.
        target_images: images to draw targets from, or None.
        target_labels: their labels.
        **kwargs: see `Attack`. With `keep="last"` the first copy is returned where none is
            misclassified, as by the released code.

    Example:
        >>> import he_keras as he, keras, numpy as np
        >>> head = keras.layers.Dense(2, kernel_initializer="identity")
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Identity(), head])
        >>> images, labels = np.array([[0.55, 0.5], [0.1, 0.9]], "float32"), np.array([0, 1])
        >>> attack = he.attacks.get("feature-10", he.ThreatModel("linf", 0.1), num_targets=1)
        >>> attack(model, images, labels).success.tolist()
        [True, False]
    """

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int = 50,
        step_size: float | str | None = None,
        num_targets: int = 10,
        targets_at_once: int = 1,
        random_start: bool | float | str = True,
        target_images=None,
        target_labels=None,
        name: str = "feature",
        **kwargs,
    ) -> None:
        super().__init__(threat, name=name, **kwargs)
        check_positive_integer("num_steps", num_steps)
        check_positive_integer("num_targets", num_targets)
        check_positive_integer("targets_at_once", targets_at_once)
        if num_targets % targets_at_once:
            raise ValueError(
                "Invalid targets_at_once; expected a divisor of num_targets; "
                f"received targets_at_once={targets_at_once}, num_targets={num_targets}"
            )
        self.num_steps = int(num_steps)
        self.step_size = threat.epsilon / 8 if step_size is None else parse_epsilon(step_size)
        if self.step_size <= 0:
            raise ValueError(f"Invalid step_size; expected > 0; received step_size={step_size!r}")
        self.num_targets = int(num_targets)
        self.targets_at_once = int(targets_at_once)
        self.random_start = checked_start(random_start)
        self._targets: tuple[np.ndarray, np.ndarray] | None = None
        self._stored: dict[tuple, tuple[tf.Variable, tf.Variable]] = {}
        self._is_called = False
        self._config_targets: tuple[np.ndarray, np.ndarray] | None = None
        if target_images is not None or target_labels is not None:
            self.use_targets(target_images, target_labels)
            self._config_targets = self._targets

    def __getstate__(self) -> dict:
        """What a copy keeps: not the variables of the compiled code."""
        return {**super().__getstate__(), "_stored": {}}

    def use_targets(self, images, labels) -> None:
        """Draws the targets of later calls from these images, which stay out of the config."""
        images, labels = check_examples(self.threat, images, labels)
        # The caller may use the array for other images.
        self._targets = images.copy(), labels

    def prepare(self, images, labels) -> None:
        """Draws the targets from these examples, unless targets were given."""
        if self._config_targets is None:
            self.use_targets(images, labels)

    def __call__(self, model, images, labels, example_ids=None, *, targets=None) -> AttackResult:
        """Attacks `model`, see `Attack.__call__`; every example needs a target of another label."""
        images, labels = check_examples(self.threat, images, labels)
        self.goal_of(labels, targets)
        target_images, target_labels = self._targets or (images, labels)
        _check_targets(target_images, target_labels, images, labels)
        self._store(target_images.astype(images.dtype), target_labels)
        self._is_called = True
        try:
            return super().__call__(model, images, labels, example_ids, targets=targets)
        finally:
            self._is_called = False

    def _store(self, images, labels) -> None:
        """Puts target images, sorted by label, where compiled code finds them."""
        order = np.argsort(labels, kind="stable")
        arrays = images[order], labels[order]
        key = _kind(images)
        if key in self._stored:
            for variable, array in zip(self._stored[key], arrays, strict=True):
                variable.assign(array)
            return
        # They may be many, and are read a few at a time.
        with tf.device("CPU:0"):
            shapes = [None, *images.shape[1:]], [None]
            kept = [
                tf.Variable(array, trainable=False, shape=tf.TensorShape(shape))
                for array, shape in zip(arrays, shapes, strict=True)
            ]
        self._stored[key] = kept[0], kept[1]

    def passes_of_run(self, num_classes: int) -> int:
        """Returns the passes of one run of an image that holds to the end, see `Attack`."""
        # Targets are images, of which there are more than classes.
        return self.num_targets * (2 * self.num_steps + 1)

    def run(self, victim: Victim, images, labels, seeds) -> Crafted:
        """Draws targets and runs towards a few at a time.

        Outside of a call, as in a training step, the targets are the examples of the batch.
        """
        if self._is_called:
            target_images, target_labels = self._stored[_kind(images)]
        else:
            order = tf.argsort(labels, stable=True)
            target_images, target_labels = tf.gather(images, order), tf.gather(labels, order)
        # Not the seeds of any start, which count from 0.
        draw_seeds = seeds_of_target(seeds, -1)
        targets = self._draw_targets(labels, tf.convert_to_tensor(target_labels), draw_seeds)
        # A seed for the whole batch has no row to select.
        per_example = seeds.shape.rank == 2
        inputs = (images, labels, targets, *([seeds] if per_example else []))

        def step(index, found, inputs):
            images, labels, targets, *own = inputs
            first = index * self.targets_at_once
            numbers = tf.gather(targets, first + tf.range(self.targets_at_once), axis=1)
            chosen = tf.gather(target_images, numbers)
            start = self._start(images, own[0] if own else seeds, first)
            return self.approach(victim, images, labels, chosen, start, found)

        is_active = (lambda found: ~found.best.broken) if self.stop_when_broken else None
        rounds = self.num_targets // self.targets_at_once
        found = iterate(step, Runs.nothing(images), inputs, rounds, is_active)
        return Crafted(found.best.point, found.forward_passes, found.backward_passes)

    def _draw_targets(self, labels, target_labels, seeds):
        """Draws positions among the sorted target images, uniform over those of other labels."""
        rows = tf.zeros_like(labels, tf.float32)[:, tf.newaxis] * tf.zeros([self.num_targets])
        drawn = draw_per_seed(uniform, rows, seeds)
        begin = tf.searchsorted(target_labels, labels, side="left")
        count = tf.searchsorted(target_labels, labels, side="right") - begin
        others = tf.cast(tf.size(target_labels) - count, drawn.dtype)[:, tf.newaxis]
        position = tf.cast(drawn * others, tf.int32)
        # The images of the label itself are passed over.
        position += tf.where(position >= begin[:, tf.newaxis], count[:, tf.newaxis], 0)
        return tf.minimum(position, tf.size(target_labels) - 1)

    def _start(self, images, seeds, first):
        """Draws the start of each copy from its own seed, `(n, targets at once, ...)`."""
        copies = self.targets_at_once
        if seeds.shape.rank == 2:
            each = [seeds_of_target(seeds, first + number) for number in range(copies)]
            seeds = tf.reshape(tf.stack(each, axis=1), [-1, 2])
        else:
            seeds = seeds_of_target(seeds, first)
        tiled = tf.repeat(images, copies, axis=0)
        start = self.threat.project(self.threat.start(self.random_start, tiled, seeds), tiled)
        return tf.reshape(start, [-1, copies, *images.shape[1:]])

    def approach(self, victim: Victim, images, labels, targets, start, found: Runs) -> Runs:
        """Runs one copy of each example towards each of its targets; returns the best found.

        Args:
            victim: the classifier.
            images: clean images, `(n, ...)`.
            labels: int tensor `(n,)`.
            targets: target images, `(n, copies, ...)`.
            start: first iterates inside the ball, of the same shape.
            found: record of earlier runs.
        """
        copies = targets.shape[1]
        target_features = tf.stop_gradient(victim.features(_flat(targets)))
        inputs = images, labels, _per_example(target_features, copies)

        def step(_index, run, inputs):
            return self._step(victim, run, *inputs)

        is_active = (lambda run: ~run.found.best.broken) if self.stop_when_broken else None
        run = iterate(step, _TargetRun(start, found), inputs, self.num_steps, is_active)
        logits = victim.logits(_flat(run.copies))
        found = self._judge(run.found, run.copies, logits, labels)
        return found._replace(forward_passes=found.forward_passes + 2 * copies)

    def _step(self, victim, run: _TargetRun, images, labels, target_features) -> _TargetRun:
        x_adv, copies = _flat(run.copies), run.copies.shape[1]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x_adv)
            features = victim.features(x_adv)

        def dissimilarity(features):
            return tf.maximum(1.0 - _cosine(features, _flat(target_features)), 0.0)

        gradient = usable(image_gradient(tape, dissimilarity, x_adv, features)[1])
        found = run.found
        if self.keep == "best" or self.stop_when_broken:
            logits = victim.logits_of_features(features)
            found = self._judge(found, run.copies, logits, labels, only_broken=self.keep == "last")
        step = -self.step_size * self.threat.steepest_step(gradient)
        moved = self.threat.project(x_adv + step, tf.repeat(images, copies, axis=0))
        moved = _per_example(moved, copies)
        if self.stop_when_broken:
            moved = select_rows(found.best.broken, run.copies, moved)
        found = found._replace(
            forward_passes=found.forward_passes + copies,
            backward_passes=found.backward_passes + copies,
        )
        return _TargetRun(moved, found)

    def _judge(self, found: Runs, copies, logits, labels, only_broken: bool = False) -> Runs:
        """Takes over the first misclassified copy, else one that comes closest to that."""
        number = copies.shape[1]
        repeated = tf.repeat(labels, number, axis=0)
        wrong = tf.reshape(is_wrong(logits, repeated), [-1, number])
        first_wrong = tf.argmax(tf.cast(wrong, tf.int32), axis=1, output_type=tf.int32)
        other = tf.zeros_like(first_wrong)
        if self.keep == "best":
            margins = _per_example(losses.margin(logits, repeated), number)
            other = tf.argmin(margins, axis=1, output_type=tf.int32)
        chosen = tf.where(tf.reduce_any(wrong, axis=1), first_wrong, other)
        x_adv = tf.gather(copies, chosen, batch_dims=1)
        logits = tf.gather(_per_example(logits, number), chosen, batch_dims=1)
        return found.judged(x_adv, logits, labels, only_broken)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        images, labels = self._config_targets or (None, None)
        return {
            **super().get_config(),
            "target_images": None if images is None else images.tolist(),
            "target_labels": None if labels is None else labels.tolist(),
        }


def _check_targets(target_images, target_labels, images, labels) -> None:
    if target_images.shape[1:] != images.shape[1:]:
        raise ValueError(
            f"Target images of another shape; expected (n, {', '.join(map(str, images.shape[1:]))})"
            f"; received {target_images.shape}"
        )
    kinds = np.unique(target_labels)
    if len(kinds) == 1 and kinds[0] in labels:
        raise ValueError(
            "No target for some examples; expected target images of at least two labels (give them "
            f"to the attack where the examples are too few); received only label {kinds[0]}"
        )


def _kind(images) -> tuple:
    """What target images must have in common with the images: shape and dtype."""
    return tuple(images.shape[1:]), tf.as_dtype(images.dtype).name


def _flat(copies):
    """Joins the axes of examples and copies, for a pass through the model."""
    return tf.reshape(copies, [-1, *copies.shape[2:]])


def _per_example(rows, copies: int):
    return tf.reshape(rows, [-1, copies, *rows.shape[1:]])


def _cosine(features, targets):
    """Cosine of the angle between rows; 0, with zero gradient, for a row of zeros."""
    product = tf.reduce_sum(features * targets, axis=1)
    squares = tf.reduce_sum(tf.square(features), axis=1) * tf.reduce_sum(tf.square(targets), axis=1)
    # Bounded below the root, whose slope at zero is infinite.
    return product / tf.sqrt(tf.maximum(squares, _LENGTHS_FLOOR**2))
