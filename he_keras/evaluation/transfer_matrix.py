"""Which models are fooled by images that were crafted for another one (the HE paper's Fig. 4).

Every image is attacked to the end, and the last iterate counts. Nothing is chosen by its success on
the model that it is crafted for. Images are crafted once, batch by batch, and all models classify a
batch before the next one is crafted.

Paper: Pang et al. 2020, the HE paper, Appendix C.4: PGD-20 and MIM-20. With the settings of its
Table 2: epsilon 0.031, `step_size=0.003`, and `logit_scale="unit"`, which weakens the images that
are crafted for cosine heads.

Example:
    >>> import he_keras as he, numpy as np, tensorflow as tf
    >>> from he_keras.evaluation.transfer_matrix import transfer_matrix
    >>> models = {
    ...     "one pixel": lambda x: tf.stack([x[:, 0], 0.5 + 0.0 * x[:, 0]], axis=1),
    ...     "two pixels": lambda x: tf.stack([x[:, 0] + x[:, 1], 1.0 + 0.0 * x[:, 0]], axis=1),
    ... }
    >>> examples = np.array([[0.55, 0.6]], "float32"), np.array([0])
    >>> (matrix,) = transfer_matrix(models, examples, he.ThreatModel("linf", 0.1), ["fgsm"])
    >>> matrix.robust_accuracy
    ((0.0, 1.0), (0.0, 0.0))
"""

import collections
import contextlib
import dataclasses
import datetime
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from he_keras.arguments import check_flag, check_positive_integer, reason_of
from he_keras.attacks import Attack
from he_keras.attacks.framework.ensemble import parts
from he_keras.drawing import draw_cells, new_figure, save_figure
from he_keras.environment import environment
from he_keras.evaluation.robustness import resolve_attacks
from he_keras.evaluation.run.attack_runs import SAMPLE_SIZE
from he_keras.evaluation.run.examples import Examples, Scorer, classify
from he_keras.files import make_writable, write_json
from he_keras.status_line import StatusLine
from he_keras.threat import ThreatModel, check_threat

SCHEMA_VERSION = 1
#: The HE paper's, on the command line and in Python.
DEFAULT_ATTACKS = ("pgd-20", "mim-20")
#: What the attacks that are given by name are built with, unless the options say otherwise.
FULL_RUN = {"keep": "last", "stop_when_broken": False}
_FRAME = "#ee6677"
_CLEAN = "(clean)"
_CORNER = "crafted for"
_LABEL_WIDTH = 18
# Nothing was crafted for the clean images: their row stands a little above the matrix.
_CLEAN_ROW = -1.12


@dataclasses.dataclass(frozen=True)
class TransferMatrix:
    """How every model fares on the images that one attack crafted for every model.

    Attributes:
        attack: name of the attack.
        robust_accuracy: one row for each model that images were crafted for, one column for each
            model that classified them: the share of *all* examples that it got right. The diagonal
            is the white-box attack.
        settings: the attack's configuration.
        names: the models.
        clean_accuracy: each model's accuracy on the images before the attack.
        num_examples: how many examples were attacked.
        threat: the threat model's configuration.
        data: the digest of images and labels.
    """

    attack: str
    robust_accuracy: tuple[tuple[float, ...], ...]
    settings: dict = dataclasses.field(repr=False)
    names: tuple[str, ...]
    clean_accuracy: tuple[float, ...]
    num_examples: int
    threat: dict
    data: str | None = None

    def table(self) -> str:
        """Returns the matrix as a text table, with the accuracy on clean images above it."""
        first = max(len(label) for label in (_CORNER, _CLEAN, *self.names)) + 2
        widths = [max(len(name), 8) + 2 for name in self.names]
        columns = zip(self.names, widths, strict=True)
        lines = [
            f"{self.title()}; rows: crafted for, columns: tested on",
            f"{_CORNER:<{first}}" + "".join(f"{name:>{width}}" for name, width in columns),
        ]
        for name, shares in ((_CLEAN, self.clean_accuracy), *self._rows()):
            cells = zip(shares, widths, strict=True)
            lines.append(
                f"{name:<{first}}" + "".join(f"{share:>{width}.2%}" for share, width in cells)
            )
        return "\n".join(lines)

    def to_json(self) -> dict:
        """Returns the section "transfer" of `docs/reference/report.md`: plain data."""
        return {
            "attack": self.attack,
            "names": list(self.names),
            "robust_accuracy": [list(shares) for shares in self.robust_accuracy],
            "clean_accuracy": list(self.clean_accuracy),
            "num_examples": self.num_examples,
            "threat": self.threat,
            "data": self.data,
            "settings": self.settings,
        }

    def title(self) -> str:
        """Returns the attack, its threat model and the number of examples, as text."""
        ball = ThreatModel(**self.threat).text()
        return f"{self.attack} ({ball}, {self.num_examples} examples)"

    def _rows(self):
        return zip(self.names, self.robust_accuracy, strict=True)


def transfer_matrix(
    models: Mapping,
    examples,
    threat: ThreatModel,
    attacks=DEFAULT_ATTACKS,
    batch_size: int = 250,
    show_progress: bool = False,
    **options,
) -> tuple[TransferMatrix, ...]:
    """Crafts images for every model and has every model classify them; see the module.

    Args:
        models: at least two classifiers of the same images and classes, by name.
        examples: as for `evaluate_robustness`.
        threat: the threat model.
        attacks: attacks, by name or as `Attack` objects. Objects must have
            `stop_when_broken=False`; attacks for the nearest adversarial image do not fit.
        batch_size: examples per compiled call.
        show_progress: show a progress bar.
        **options: passed to attacks given by name, as in `evaluate_robustness`. `keep="best"`
            takes the iterate that is strongest on the model that it is crafted for.

    Returns:
        One matrix for each attack.
    """
    names, classifiers = _checked_models(models)
    check_threat(threat)
    check_positive_integer("batch_size", batch_size)
    check_flag("show_progress", show_progress)
    chosen = _chosen(attacks, threat, batch_size, options)
    checked = Examples(threat, examples, batch_size)
    scorers = [Scorer(model) for model in classifiers]
    _check_fit(names, classifiers, scorers, chosen, checked)
    answers = [classify(scorer, checked) for scorer in scorers]
    clean = [each.scored.wrong for each in answers]
    shared: dict[str, Any] = {
        "names": names,
        "clean_accuracy": tuple(float(1.0 - wrong.mean()) for wrong in clean),
        "num_examples": len(clean[0]),
        "threat": threat.get_config(),
        "data": answers[0].digest,
    }
    total = len(clean[0]) * len(names) * len(chosen)
    with _Runs(classifiers, scorers, checked, total, show_progress) as runs:
        return tuple(
            TransferMatrix(attack.name, runs.matrix(attack, names), attack.get_config(), **shared)
            for attack in chosen
        )


class _Runs:
    """Crafts and scores, batch by batch."""

    def __init__(self, models, scorers, examples: Examples, total: int, show: bool) -> None:
        self._models = models
        self._scorers = scorers
        self._examples = examples
        self._line = StatusLine("transfer", show)
        self._total, self._done, self._text = total, 0, ""

    def matrix(self, attack: Attack, names) -> tuple[tuple[float, ...], ...]:
        """One row of accuracies for each model that the images are crafted for."""
        rows = []
        for name, model in zip(names, self._models, strict=True):
            self._text = f"{attack.name} on {name}"
            self._line.count(self._done, self._total, self._text)
            rows.append(self._row(attack, model))
        return tuple(rows)

    def _row(self, attack: Attack, source) -> tuple[float, ...]:
        num_correct = np.zeros(len(self._scorers), int)
        count = 0
        for block in self._examples.blocks(self._examples.batch_size, None):
            result = attack(source, block.images, block.labels, example_ids=block.positions)
            for target, scorer in enumerate(self._scorers):
                num_correct[target] += int((~scorer(result.x_adv, block.labels).wrong).sum())
            count += len(block.labels)
            self._done += len(block.labels)
            self._line.count(self._done, self._total, self._text)
        return tuple(float(share) for share in num_correct / count)

    def __enter__(self) -> "_Runs":
        return self

    def __exit__(self, *_) -> None:
        self._line.close()


def _checked_models(models) -> tuple[tuple[str, ...], list]:
    if not isinstance(models, Mapping):
        raise TypeError(
            "Invalid models; expected a mapping from names to models; "
            f"received {type(models).__name__}"
        )
    names = tuple(str(name) for name in models)
    if len(names) < 2:
        raise ValueError(f"Too few models; expected at least two; received {list(names)}")
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"Models must have different names; expected no repeats; received {names}")
    return names, list(models.values())


def _chosen(attacks, threat: ThreatModel, batch_size: int, options: dict) -> list[Attack]:
    chosen = resolve_attacks(attacks, threat, **{"batch_size": batch_size, **FULL_RUN, **options})
    names = [attack.name for attack in chosen]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Attacks must have different names; expected no repeats; received {names}"
        )
    for attack in chosen:
        stops = any(part.stop_when_broken or part.minimum_norm for part in parts(attack))
        if stops:
            raise ValueError(
                "Images must be attacked to the end to transfer; expected an attack inside the "
                "ball with stop_when_broken=False, such as pgd-20 or mim-20; "
                f"received {attack.name}"
            )
    return chosen


def _check_fit(names, models, scorers, attacks, examples: Examples) -> None:
    """Runs every model on a few images, which all must accept, with the same number of classes."""
    sample = next(examples.blocks(SAMPLE_SIZE, None), None)
    if sample is None:
        raise ValueError("No examples; expected at least one; received 0")
    images, labels = sample.images, sample.labels
    num_classes = {}
    for name, scorer in zip(names, scorers, strict=True):
        with _naming(name, images):
            num_classes[name] = scorer.num_classes(images)
    if len(set(num_classes.values())) > 1:
        raise ValueError(
            "The models differ in their number of classes; expected the same for all; "
            f"received {num_classes}"
        )
    for attack in attacks:
        for part in parts(attack):
            part.prepare(images, labels)
        for name, model in zip(names, models, strict=True):
            with _naming(name, images):
                attack.check_model(model, images, labels)


@contextlib.contextmanager
def _naming(name: str, images) -> Iterator[None]:
    """Names the model in the error if it cannot work on the images."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ValueError(
            "A model does not fit the examples; expected classifiers of images of shape "
            f"{images.shape[1:]}; received {name}: {reason_of(error)}"
        ) from error


def write_transfer(folder, matrices) -> pathlib.Path:
    """Writes `transfer.json` and one heat map for each attack, `transfer-ATTACK.png`.

    Args:
        folder: where the files go; created where it is missing.
        matrices: what `transfer_matrix` returned.

    Returns:
        The path of `transfer.json`.

    Example:
        >>> from he_keras.evaluation.transfer_matrix import write_transfer
        >>> # write_transfer("runs/transfer", transfer_matrix(models, examples, threat))
    """
    folder = make_writable(pathlib.Path(folder), "the transfer matrices")
    matrices = list(matrices)
    for matrix in matrices:
        file_name = re.sub(r"[^\w.-]+", "-", matrix.attack).strip("-.")
        plot_transfer(matrix, folder / f"transfer-{file_name}.png")
    path = folder / "transfer.json"
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "matrices": [matrix.to_json() for matrix in matrices],
        "environment": environment(),
    }
    write_json(path, content)
    return path


def plot_transfer(matrix: TransferMatrix, path) -> pathlib.Path:
    """Draws a matrix as a heat map, darker where a model is fooled more often.

    The colours always span 0 to 100 %, so that pictures of two attacks can be compared. A frame
    marks the white-box cells.

    Args:
        matrix: what to draw.
        path: picture to write (.png).

    Example:
        >>> from he_keras.evaluation.transfer_matrix import plot_transfer
        >>> # plot_transfer(matrix, "transfer.png")
    """
    from matplotlib.patches import Rectangle

    count = len(matrix.names)
    figure = new_figure(3.0 + 0.95 * count, 2.2 + 0.6 * count)
    axes = figure.subplots()
    for top, shares in ((_CLEAN_ROW, [matrix.clean_accuracy]), (0, matrix.robust_accuracy)):
        draw_cells(axes, 100.0 * np.array(shares), (0.0, 100.0), "{:.1f}", 9, top)
    for position in range(count):
        corner = position - 0.47, position - 0.47
        axes.add_patch(Rectangle(corner, 0.94, 0.94, fill=False, edgecolor=_FRAME, linewidth=2))
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, _CLEAN_ROW - 0.5), aspect="auto")
    labels = [textwrap.fill(name, _LABEL_WIDTH, break_on_hyphens=True) for name in matrix.names]
    slanted: dict = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    is_long = max(len(name) for name in matrix.names) > 10
    axes.set_xticks(range(count), labels, fontsize=8, **(slanted if is_long else {}))
    axes.set_yticks([_CLEAN_ROW, *range(count)], ["clean", *labels], fontsize=8)
    axes.set(xlabel="tested on", ylabel="crafted for")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # Of two models, a single line would be wider than the picture.
    title = f"Accuracy in % under {matrix.title()}".replace(" (", "\n(", 1)
    axes.set_title(f"{title}\nframed: white box", fontsize=9, loc="left")
    return save_figure(figure, path)
