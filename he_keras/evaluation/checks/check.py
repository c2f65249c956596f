"""What a check is given and what it says: samples of examples, outcomes, and counts as verdicts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from he_keras.arguments import check_choice
from he_keras.attacks import Attack, AttackResult, Victim, check_examples, get
from he_keras.attacks.framework.agreement import agreed
from he_keras.attacks.framework.result import is_wrong
from he_keras.attacks.framework.victim import check_class_numbers
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    Pair,
    exceeds,
    fewest_beyond,
    fewest_gains,
    resolution,
    share_exceeds,
)
from he_keras.threat import ThreatModel

WHEN = ("before", "after")
VERDICTS = ("pass", "warn", "fail", "skipped")
#: From this share on, a finding is no longer in doubt.
_SEVERE = 0.05
#: Bounds the memory of a check; no result depends on it.
_BATCH_SIZE = 128
#: Far above any number of examples, so that no restart repeats the draws of another example.
#: Any number of this size would do; this one is a prime.
_RESTART = 1_000_003
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of one check; `docs/reference/checks.md` has a section for each name.

    Attributes:
        name: kebab-case, and the anchor of its section.
        when: "before" or "after" the attacks.
        verdict: "pass"; "warn": look at it before you believe the figures; "fail": the figures are
            not to be believed; "skipped": it does not apply, or could not be decided.
        figure: the number that was measured, as text.
        message: what it means and what to do, in one sentence.
        resolution: how small an effect so many images can show; empty where chance plays no part.

    Example:
        >>> from he_keras.evaluation.checks.check import Check
        >>> Check("logits", "before", "pass", "values -3 to 9", "No probabilities.").fired
        False
    """

    name: str
    when: str
    verdict: str
    figure: str
    message: str
    resolution: str = ""

    def __post_init__(self) -> None:
        check_choice("when", self.when, WHEN)
        check_choice("verdict", self.verdict, VERDICTS)

    @property
    def fired(self) -> bool:
        """Whether the check found something: its verdict is "warn" or "fail"."""
        return self.verdict in ("warn", "fail")


class Outcome(NamedTuple):
    """A `Check` without name and time, which its row in the table of checks adds."""

    verdict: str
    figure: str
    message: str
    resolution: str = ""

    @property
    def fired(self) -> bool:
        """Whether something was found."""
        return self.verdict in ("warn", "fail")


def passed(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome in which nothing is wrong."""
    return Outcome("pass", figure, message, resolution)


def warned(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome to look at before the figures are believed."""
    return Outcome("warn", figure, message, resolution)


def failed(figure: str, message: str, resolution: str = "") -> Outcome:
    """Returns an outcome after which the figures are not to be believed."""
    return Outcome("fail", figure, message, resolution)


def skipped(reason: str) -> Outcome:
    """Returns the outcome of a check that could not be made."""
    return Outcome("skipped", "not measured", reason)


class Wording(NamedTuple):
    """What a check measured, and what that means if it passes or does not."""

    figure: str
    good: str
    bad: str


def surplus_outcome(count: int, at_stake: int, total: int, share: float, words: Wording) -> Outcome:
    """Passes unless `count` examples are more than `share` of all, beyond chance.

    Args:
        count: examples that speak against the evaluation; none can speak for it.
        at_stake: how many could have.
        total: how many examples there are.
        share: of all, that does not matter.
        words: what to say.
    """
    needed = fewest_beyond(total, share)
    if at_stake < needed:
        return skipped(_too_few(at_stake, total, needed))
    return _outcome(lambda share: exceeds(count, total, share), share, words, needed, total)


def paired_outcome(pairs: Sequence[Pair], at_stake: int, share: float, words: Wording) -> Outcome:
    """Passes unless one of several attacks is stronger than the first, beyond chance.

    Examples that only the other attack breaks are weighed against those that only the first one
    breaks. The more attacks are tried, the more each has to show (Bonferroni).

    Args:
        pairs: the first attack against each other one.
        at_stake: how many examples the first one left.
        share: of all, that does not matter.
        words: what to say.
    """
    level, total = CHANCE_LEVEL / len(pairs), pairs[0].total
    needed = fewest_gains(total, share, level)
    if at_stake < needed:
        return skipped(_too_few(at_stake, total, needed))

    def is_beyond(share: float) -> bool:
        return any(pair.exceeds(share, level) for pair in pairs)

    return _outcome(is_beyond, share, words, needed, total)


def mean_outcome(
    parts: np.ndarray, wholes: np.ndarray, share: float, verdict: str, words: Wording
) -> Outcome:
    """Passes unless the parts are more than a share of all wholes together, beyond chance.

    Args:
        parts: one for each image.
        wholes: what each is a part of.
        share: of the wholes, that does not matter.
        verdict: if the parts are more than that.
        words: what to say.
    """
    is_beyond, least = share_exceeds(parts, wholes, share)
    limit = f"with {len(parts)} images less than {least:.1%} cannot be told from {share:.0%}"
    if is_beyond:
        return Outcome(verdict, words.figure, words.bad, limit)
    return passed(words.figure, words.good, limit)


def _outcome(
    is_beyond: Callable[[float], bool], share: float, words: Wording, needed: int, total: int
) -> Outcome:
    limit = resolution(needed, total, "a gain")
    if not is_beyond(share):
        return passed(words.figure, words.good, limit)
    verdict = "fail" if is_beyond(max(share, _SEVERE)) else "warn"
    return Outcome(verdict, words.figure, words.bad, limit)


def _too_few(at_stake: int, total: int, needed: int) -> str:
    return (
        f"Only {at_stake} of {total} examples were left to be found, and fewer than {needed} "
        "cannot be told from nothing."
    )


def points(count: int, total: int) -> str:
    """Text of a number of examples as percentage points.

    Example:
        >>> from he_keras.evaluation.checks.check import points
        >>> points(2, 64)
        '+3.1 points (2 of 64)'
    """
    return f"{100.0 * count / total:+.1f} points ({count} of {total})"


class Sample:
    """A classifier and a few examples.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: checked images within the threat model's bounds.
        labels: checked integer labels.
        threat: the threat model.

    Attributes:
        victim: the classifier.
        logits: its answer to the images.
    """

    victim: Victim
    logits: np.ndarray

    def __init__(self, model, images: np.ndarray, labels: np.ndarray, threat: ThreatModel) -> None:
        self.model, self.threat = model, threat
        self.images, self.labels = images.astype(np.float32), labels
        self._found: dict[Callable, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of logits."""
        return self.logits.shape[1]

    @property
    def correct(self) -> np.ndarray:
        """Mask of the images that are classified correctly."""
        return self.logits.argmax(axis=1) == self.labels

    @property
    def chance(self) -> float:
        """The accuracy of a model that always answers with the sample's commonest class."""
        return float(np.bincount(self.labels).max() / len(self.labels))

    def once(self, function: Callable[[Any], Found]) -> Found:
        """Returns `function(self)`, which is computed the first time only.

        Several checks share measurements, and some need the outcome of others.
        """
        if function not in self._found:
            self._found[function] = function(self)
        return self._found[function]


class CleanSample(Sample):
    """Examples before any attack, on the path that attacks take (`attacks.framework.agreement`).

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the threat model's bounds.
        labels: integer labels.
        threat: the threat model.
        logit_scale: see `he_keras.attacks.Victim`.
        most_images: how many of the images to use, from the first; None for all.

    Attributes:
        variables: the model's floating-point variables.
        initial_values: their values before the first pass.
    """

    def __init__(
        self,
        model,
        images,
        labels,
        threat: ThreatModel,
        logit_scale: float | str = "model",
        most_images: int | None = None,
    ) -> None:
        images, labels = check_examples(threat, images, labels)
        super().__init__(model, images[:most_images], labels[:most_images], threat)
        self.variables = _variables(model, Victim(model, logit_scale), self.images)
        self.initial_values = [variable.numpy() for variable in self.variables]
        self.victim = agreed(model, self.images, logit_scale)[0].for_many_passes()
        self.logits = self.victim.logits(tf.constant(self.images)).numpy()
        count = len(self.images)
        if self.logits.ndim != 2 or len(self.logits) != count:
            raise ValueError(
                f"Not a classifier; expected logits of shape ({count}, classes) for {count} "
                f"images; received shape {self.logits.shape}"
            )
        check_class_numbers(self.labels, self.num_classes)


class AttackedSample(Sample):
    """A few examples, the classifier in compiled form, and what gradient attacks broke so far.

    Every attack compiles a loop around the classifier. The classifier is compiled only once.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        images: images within the bounds.
        labels: integer labels.
        threat: the threat model.
        logit_scale: see `Victim`.
        num_steps: steps of the iterated attack that most checks use.
        num_queries: queries of the attack without gradients.
        num_points: random points that are tried around each image.
        seed: seed of all draws.
        curve: result of `epsilon_curve`; None measures one where it is needed.
        still_correct: flags for the same images that an evaluation left, by name of the attack.
    """

    def __init__(
        self,
        model,
        images,
        labels,
        threat: ThreatModel,
        logit_scale: float | str = "model",
        *,
        num_steps: int = 20,
        num_queries: int = 200,
        num_points: int = 100,
        seed: int = 0,
        curve: dict | None = None,
        still_correct: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(model, *check_examples(threat, images, labels), threat)
        self.num_steps, self.num_queries, self.num_points = num_steps, num_queries, num_points
        self.seed, self.curve, self.still_correct = seed, curve, still_correct
        self.victim = Victim(model, logit_scale)
        self.function = compiled(
            lambda images: self.victim.for_many_passes().logits(images), self.images
        )
        self.logits = self.answers(self.images)
        #: Examples that no gradient attack on the model itself has broken.
        self.unbroken = ~is_wrong(self.logits, self.labels).numpy()
        #: Pairs of positions and results, to be scored again.
        self.results: list[tuple[np.ndarray, AttackResult]] = []

    def answers(self, images) -> np.ndarray:
        """Returns the logits of images."""
        parts = [
            np.asarray(self.function(tf.constant(images[first : first + _BATCH_SIZE])))
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

    def run(self, attack: Attack, rows=None, restart: int = 0, function=None) -> np.ndarray:
        """Returns which examples an attack on the model breaks, and remembers the result.

        Clean mistakes count as broken. Only `rows` are attacked; the others count as not broken.
        `function` is another form of the same classifier, with the same decisions.
        """
        rows = np.arange(len(self)) if rows is None else rows
        broken = np.zeros(len(self), bool)
        if len(rows):
            ids = rows + restart * _RESTART
            function = function or self.function
            result = attack(function, self.images[rows], self.labels[rows], example_ids=ids)
            broken[rows] = result.success
            if attack.threat == self.threat:
                self.results.append((rows, result))
                if attack.uses_gradient:
                    self.unbroken &= ~broken
        return broken

    def broken_by_noise(self, rows: np.ndarray, num_points: int, seed: int) -> np.ndarray:
        """Returns which of some examples random points of the ball around them break."""
        images, labels = tf.constant(self.images[rows]), self.labels[rows]
        broken = np.zeros(len(rows), bool)
        for point in range(num_points):
            noisy = self.threat.random_start(images, tf.constant([seed, point]))
            broken |= is_wrong(self.function(noisy), labels).numpy()
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


def _variables(model, victim: Victim, images) -> list[Any]:
    """The floating-point variables of a model, also of one that is hidden in a function.

    The state of random generators is integer, and may rightly change.
    """
    found = getattr(model, "variables", None)
    if found is None:
        try:
            graph = tf.function(victim.logits, autograph=False)
            function = graph.get_concrete_function(tf.constant(images[:1]))
        except Exception:  # noqa: BLE001
            # Code of any kind, which may not run in a graph: then its state cannot be seen.
            return []
        found = function.graph.variables
    return [each for each in found if tf.as_dtype(each.dtype).is_floating]
