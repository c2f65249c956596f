"""A folder of results belongs to one function, one set of images and one plan.

The function is known by its answers to a few probe images. Equal weights do not make equal
functions, nor do equal predictions. The scale of a head, the preprocessing in a callable or a stop
in its gradient shows in the logits and in their slopes. The probes are images of the data, and
images at the edge of the threat model.

Answers are numbers, not digests of bits: CPUs, batch sizes and threads round differently, and an
evaluation may go on elsewhere. `LIMIT` says what counts as rounding. A random model answers
differently each time: its own passes are compared first, and their differences are allowed for.
"""

import json
import math
import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.attacks import Victim
from he_keras.evaluation.run import facts
from he_keras.evaluation.run.journal import A_RECORD, FOLDER
from he_keras.files import lock, read_json, read_npz, write_json, write_npz
from he_keras.precision import coarsest_precision
from he_keras.threat import ThreatModel

SETTINGS, ANSWERS = "settings.json", "answers.npz"
# A margin is the difference of two logits, and among many examples some lie outside any limit.
_MARGIN_FACTOR = 4.0

#: A logit may change by this share of the spread of all logits: that is rounding. The second number
#: is for models with layers in half precision.
LIMIT, HALF_LIMIT = 0.002, 0.03
#: The same for slopes. Their root mean square is compared, as a kink near a probe may change one.
_SLOPE_FACTOR, _LEAST_SLOPE_LIMIT = 10.0, 0.05
#: A random model's answers may differ by so many times their own noise, and be the same function.
_NOISE_FACTOR = 4.0
_NUM_PROBES = 32


class Answers(NamedTuple):
    """Means over several passes, in two batch sizes.

    Attributes:
        logits: one row for each probe.
        slopes: how fast a mixture of the logits changes in one direction; 0 without a gradient.
        noise: largest difference between the first pass and another, of logits and of slopes.
        limit: the share of the spread of the logits that counts as rounding.
    """

    logits: np.ndarray
    slopes: np.ndarray
    noise: np.ndarray
    limit: np.ndarray

    @property
    def spread(self) -> float:
        """The standard deviation of the logits."""
        finite = _finite(self.logits)
        # A constant answer has no spread but its rounding.
        return max(float(finite.std()), 1e-6 * float(np.abs(finite).max()), 1e-30)

    @property
    def steepness(self) -> float:
        """The root mean square of the slopes."""
        return max(math.sqrt(float(np.mean(_finite(self.slopes) ** 2))), 1e-6 * self.spread)

    @property
    def are_random(self) -> bool:
        """Whether the passes differ by more than rounding."""
        return not self.noise[0] <= self.limit * self.spread


def probes_of(images: np.ndarray, threat: ThreatModel) -> np.ndarray:
    """Returns some of the images, and each moved by epsilon in a fixed random direction."""
    rows = np.unique(np.linspace(0, len(images) - 1, _NUM_PROBES).round().astype(int))
    chosen = images[rows]
    signs = np.random.RandomState(0).choice([-1.0, 1.0], chosen.shape).astype(chosen.dtype)
    moved = threat.project(tf.constant(chosen + threat.epsilon * signs), tf.constant(chosen))
    return np.concatenate([chosen, moved.numpy()])


def answers_of(model, probes: np.ndarray) -> Answers:
    """Asks a model four times: twice all probes at once, twice in halves."""
    victim = Victim(model)
    random = np.random.RandomState(1)
    direction = random.choice([-1.0, 1.0], probes.shape[1:]).astype(probes.dtype)
    mixture = random.standard_normal(victim.logits(tf.constant(probes[:1])).shape[-1])

    @tf.function(input_signature=[tf.TensorSpec([None, *probes.shape[1:]], probes.dtype)])
    def respond(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            logits = victim.logits(images)
            mixed = tf.reduce_sum(logits * tf.cast(mixture, logits.dtype))
        gradient = tape.gradient(mixed, images)
        if gradient is None:
            return logits, tf.zeros_like(logits[:, 0])
        slopes = tf.reduce_sum(gradient * direction, axis=list(range(1, len(probes.shape))))
        return logits, slopes

    half = max(len(probes) // 2, 1)
    passes = []
    for parts in (
        [probes],
        [probes],
        [probes[:half], probes[half:]],
        [probes[:half], probes[half:]],
    ):
        columns = zip(*(respond(tf.constant(part)) for part in parts if len(part)), strict=True)
        passes.append([np.concatenate(column).astype(np.float64) for column in columns])
    logits, slopes = (np.array(column) for column in zip(*passes, strict=True))
    noise = [
        max(_largest(logits[0], each) for each in logits[1:]),
        max(_mean_square(slopes[0], each) for each in slopes[1:]),
    ]
    precision = coarsest_precision(victim.model, victim.logits, probes.shape[1:])
    limit = LIMIT if precision == "float32" else HALF_LIMIT
    return Answers(logits.mean(axis=0), slopes.mean(axis=0), np.array(noise), np.array(limit))


def answer_differences(recorded: Answers, now: Answers) -> list[str]:
    """Returns what is more than rounding and noise between the answers to the same probes."""
    if recorded.logits.shape != now.logits.shape:
        return [f"logits: {recorded.logits.shape[1:]} -> {now.logits.shape[1:]}"]
    # The finer of the two precisions sets the limit.
    limit = float(min(recorded.limit, now.limit))
    scales = recorded.spread, recorded.steepness
    apart = (
        _largest(recorded.logits, now.logits),
        _mean_square(recorded.slopes, now.slopes),
    )
    found = []
    for number, name in enumerate(("logits", "gradient")):
        share = max(_SLOPE_FACTOR * limit, _LEAST_SLOPE_LIMIT) if number else limit
        allowed = share * scales[number]
        noises = recorded.noise[number], now.noise[number]
        # A function that has become random, or is no longer random, is another one.
        if max(noises) > 10.0 * max(min(noises), allowed):
            shown = [noise / scales[number] for noise in noises]
            found.append(f"noise of the {name}: {shown[0]:.2%} -> {shown[1]:.2%}")
        elif not apart[number] <= max(allowed, _NOISE_FACTOR * max(noises)):
            found.append(
                f"{name} on probe images: {apart[number] / scales[number]:.2%} apart (rounding: "
                f"up to {allowed / scales[number]:.2%})"
            )
    return found


def _finite(values: np.ndarray) -> np.ndarray:
    finite = values[np.isfinite(values)]
    return finite if len(finite) else np.zeros(1)


def _largest(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.max(_change(first, second), initial=0.0))


def _mean_square(first: np.ndarray, second: np.ndarray) -> float:
    return math.sqrt(float(np.mean(_change(first, second) ** 2)))


def _change(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the difference; infinite where only one is finite, or both differ in infinity."""
    with np.errstate(invalid="ignore"):
        change = np.abs(first - second)
    alike = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(alike, 0.0, np.where(np.isnan(change), np.inf, change))


class Claim(NamedTuple):
    """What holds in a folder.

    Attributes:
        settings: those that the evaluation began with.
        tolerance: how much clean margins may differ from those recorded. It is infinite for a
            random model, whose recorded verdicts count.
    """

    settings: dict
    tolerance: float


def claim(folder: pathlib.Path, settings: dict, models: dict, probes: np.ndarray) -> Claim:
    """Claims a folder for this evaluation; raises a ValueError if it holds another one.

    Args:
        folder: for the record.
        settings: what `settings_of` returned.
        models: the model and what else decides the verdicts, by name; the model comes first.
        probes: images that the models are known by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Through JSON, which knows no tuples.
    settings = json.loads(json.dumps(settings))
    # If several processes begin together, the first one says what the folder is for.
    with lock(folder / ".lock-settings", wait=True):
        if (folder / SETTINGS).exists():
            recorded = read_json(folder / SETTINGS, A_RECORD)
            _check_settings(recorded, settings, folder)
            answers = _check_answers(models, folder)
        else:
            recorded = settings
            answers = next(iter(_write_answers(models, probes, folder).values()))
            write_json(folder / SETTINGS, settings)
    if answers.are_random:
        return Claim(recorded, np.inf)
    return Claim(recorded, _MARGIN_FACTOR * float(answers.limit) * answers.spread)


def function_differences(model, recorded: dict, folder: pathlib.Path | None) -> list[str]:
    """Returns how a model differs from the one that an evaluation recorded.

    Args:
        model: the model.
        recorded: the evaluation's facts of its model, all or brief.
        folder: the evaluation's `output_dir`; None where only its report is known.
    """
    now = facts.model_facts(model)
    found = facts.model_differences(_in_full(recorded, folder), now)
    if found or folder is None or not has_answers(folder):
        return found
    probes, stored = _read_answers(folder / FOLDER / ANSWERS)
    return answer_differences(stored["model"], answers_of(model, probes))


def has_answers(folder: pathlib.Path) -> bool:
    """Whether an evaluation's folder holds the answers that its model is known by."""
    return (folder / FOLDER / ANSWERS).exists()


def _in_full(recorded: dict, folder: pathlib.Path | None) -> dict:
    """Returns the facts with the configuration, which a report does not hold, if it is known."""
    path = None if folder is None else folder / FOLDER / SETTINGS
    if path is None or not path.exists():
        return recorded
    full = read_json(path, A_RECORD).get("model") or {}
    return full if facts.brief(full) == facts.brief(recorded) else recorded


def _check_settings(recorded, settings: dict, folder: pathlib.Path) -> None:
    if not isinstance(recorded, dict) or not isinstance(recorded.get("model"), dict):
        raise ValueError(
            "The folder holds an evaluation of an earlier he_keras, which recorded the weights and "
            "not the function (head, preprocessing); expected a folder of this version; received "
            f"{folder.parent}; use another output_dir, or delete this one"
        )
    _refuse(facts.differences(recorded, settings), folder)


def _check_answers(models: dict, folder: pathlib.Path) -> Answers:
    probes, stored = _read_answers(folder / ANSWERS)
    for name, model in models.items():
        now = answers_of(model, probes)
        found = answer_differences(stored[name], now)
        _refuse([f"{name}: {each}" if name != "model" else each for each in found], folder)
    return stored[next(iter(models))]


def _refuse(found: list[str], folder: pathlib.Path) -> None:
    if found:
        raise ValueError(
            "The folder holds another evaluation; expected the function, images and settings that "
            f"it began with; received {facts.shown(found)} (folder {folder.parent}); use "
            "another output_dir, or delete this one"
        )


def _write_answers(models: dict, probes: np.ndarray, folder: pathlib.Path) -> dict[str, Answers]:
    answers = {name: answers_of(model, probes) for name, model in models.items()}
    columns = {
        f"{name}/{field}": column
        for name, each in answers.items()
        for field, column in each._asdict().items()
    }
    write_npz(folder / ANSWERS, {"probes": probes, **columns})
    return answers


def _read_answers(path: pathlib.Path) -> tuple[np.ndarray, dict[str, Answers]]:
    try:
        arrays = read_npz(path)
        probes = arrays.pop("probes")
        names = dict.fromkeys(name.rpartition("/")[0] for name in arrays)
        columns = {name: [arrays[f"{name}/{each}"] for each in Answers._fields] for name in names}
        return probes, {name: Answers(*each) for name, each in columns.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Damaged record; expected the model's answers in {path}; received "
            f"{type(error).__name__}; use another output_dir"
        ) from error
