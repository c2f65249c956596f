"""The examples that the checks after the attacks work on, and the attacks that they run."""

import functools

import numpy as np
import tensorflow as tf

from he_keras.attacks import Attack, AttackResult, Victim, check_examples, get
from he_keras.attacks.attack import is_wrong
from he_keras.evaluation.check import Check, exceeds
from he_keras.threat import ThreatModel

_BATCH_SIZE = 128
_RESTART = 1_000_003
#: From this share on, what was found is no doubt any more.
_SEVERE = 0.05


class Sample:
    """A few examples, the classifier in compiled form, and what gradient attacks broke so far.

    Every attack compiles a loop around the classifier, which itself is compiled only once.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the bounds.
        labels: integer labels.
        threat: the threat model.
        logit_scale: see `Victim`.
        num_steps: steps of the iterated attack that most checks use.
        seed: seed of all draws.
    """

    def __init__(
        self,
        model,
        images,
        labels,
        threat: ThreatModel,
        logit_scale: float | str = "model",
        num_steps: int = 20,
        seed: int = 0,
    ) -> None:
        images, labels = check_examples(threat, images, labels)
        self.images, self.labels = images.astype(np.float32), labels
        self.threat = threat
        self.num_steps = num_steps
        self.seed = seed
        self.victim = Victim(model, logit_scale)
        self.model = compiled(self.victim.logits, self.images)
        self.logits = self.answers(self.images)
        #: Examples that no gradient attack on the model itself has broken.
        self.unbroken = ~is_wrong(self.logits, labels).numpy()
        #: Pairs of positions and results, to be scored again.
        self.results: list[tuple[np.ndarray, AttackResult]] = []

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of logits."""
        return self.logits.shape[1]

    def answers(self, images) -> np.ndarray:
        """Returns the logits of images."""
        parts = [
            np.asarray(self.model(tf.constant(images[first : first + _BATCH_SIZE])))
            for first in range(0, len(images), _BATCH_SIZE)
        ]
        return np.concatenate(parts)

    def ascent(self, loss: str = "cw", steps: int | None = None, threat=None, **options) -> Attack:
        """Builds the iterated attack of the checks: PGD, or in l1 APGD.

        A step of PGD in l1 changes one pixel, so that few steps get nowhere.
        """
        threat = threat or self.threat
        name = "apgd-dlr" if threat.norm == "l1" else "cw-linf"
        return self.build(f"{name}-{steps or self.num_steps}", threat, loss=loss, **options)

    def build(self, name: str, threat=None, **options) -> Attack:
        """Builds an attack by name, with the seed of the checks."""
        options = {"batch_size": _BATCH_SIZE, "seed": self.seed, **options}
        return get(name, threat or self.threat, **options)

    def run(self, attack: Attack, rows=None, restart: int = 0, model=None) -> np.ndarray:
        """Returns which examples an attack on the model breaks, and remembers the result.

        Clean mistakes count as broken. Only `rows` are attacked; the others count as not broken.
        `model` is another form of the same classifier, with the same decisions.
        """
        rows = np.arange(len(self)) if rows is None else rows
        broken = np.zeros(len(self), bool)
        if len(rows):
            ids = rows + restart * _RESTART
            model = model or self.model
            result = attack(model, self.images[rows], self.labels[rows], example_ids=ids)
            broken[rows] = result.success
            if attack.threat == self.threat:
                self.results.append((rows, result))
                if attack.uses_gradient:
                    self.unbroken &= ~broken
        return broken

    @functools.cached_property
    def plain_result(self) -> AttackResult:
        """The result of the iterated attack on the margin, run once."""
        self.run(self.plain_attack)
        return self.results[-1][1]

    @property
    def plain(self) -> np.ndarray:
        """Which examples the iterated attack on the margin breaks."""
        return self.plain_result.success

    @functools.cached_property
    def plain_attack(self) -> Attack:
        """The iterated attack on the margin; a second call need not compile it again."""
        return self.ascent()


def compiled(function, images):
    """Returns `function` as one graph for every batch size; as it is, if it cannot be a graph."""
    signature = [tf.TensorSpec([None, *images.shape[1:]], tf.float32)]
    graph = tf.function(function, input_signature=signature)
    try:
        graph.get_concrete_function()
    except Exception:  # noqa: BLE001
        # A model may be any Python code.
        return function
    return graph


def skipped(name: str, reason: str) -> Check:
    """Returns the check of that name as one that could not be made."""
    return Check(name, "after", "skipped", "not measured", reason)


def surplus_check(
    name: str, count: int, sample, share: float, figure: str, good: str, bad: str
) -> Check:
    """Passes unless `count` examples are more than `share` of the sample, beyond chance."""
    verdict = "pass"
    if exceeds(count, len(sample), share):
        verdict = "fail" if exceeds(count, len(sample), max(share, _SEVERE)) else "warn"
    return Check(name, "after", verdict, figure, good if verdict == "pass" else bad)


def points(count: int, sample) -> str:
    """Text of a number of examples as percentage points.

    Example:
        >>> from he_keras.evaluation.sanity.sample import points
        >>> points(2, range(64))
        '+3.1 points (2 of 64)'
    """
    return f"{100.0 * count / len(sample):+.1f} points ({count} of {len(sample)})"
