"""Feature normalisation in the attack alone: does it break an ordinary network in fewer steps?

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Table 7, a WRN-34-10 without
adversarial training. Under PGD-1 it keeps 67.09 % without FN in the attack and 62.89 % with it.
Under PGD-2 it keeps 50.37 % and 33.75 %. Step, start and epsilon are not given, so a grid of steps
and starts is measured.

Normalised features make small logits, and the softmax of small logits is flat: its gradient mixes
all wrong classes. The paper's argument is not about that change. So a third objective is compared
with the two: the logits stay as they are, and only the gradient along the feature's length is
removed.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from he_keras import attacks
from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.registry import register
from he_keras.arguments import check_choice, check_positive_integer, check_seed, positive_number
from he_keras.drawing import draw_bars, legend_below
from he_keras.layers.feature_norm import normalize

#: Names of starts and what `ProjectedGradient` calls them.
STARTS = {"image": False, "uniform": True}
_OBJECTIVES = {"without FN": "pgd", "with FN": "fn-pgd", "FN, own scale": "pgd"}
_OWN_SCALE = "FN, own scale"


@register("feature-norm-attack")
@dataclasses.dataclass(eq=False)
class FeatureNormAttack(Analysis):
    """Attacks with and without feature normalisation in the loss (HE paper, Table 7).

    "with FN" is the paper's Eq. 12, "FN, own scale" takes the feature's length back in as a
    constant. All score the last iterate by the victim's own logits. For models with a head that has
    a kernel. Cost for each example: for each step size and start `3 * sum(num_steps)` forward and
    backward passes.

    Args:
        num_steps: numbers of steps K, one table each.
        step_sizes: lengths of a step, numbers or fractions.
        starts: "image" (the clean image) and "uniform" (anywhere in the ball).
        seed: seed of the uniform start.
    """

    num_steps: tuple[int, ...] = (1, 2)
    step_sizes: tuple[str, ...] = ("0.003", "2/255")
    starts: tuple[str, ...] = tuple(STARTS)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "step_sizes"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not given:
                raise ValueError(f"Invalid {name}; expected a tuple; received {name}={given!r}")
        for count in self.num_steps:
            check_positive_integer("num_steps", count)
        for start in self.starts:
            check_choice("starts", start, tuple(STARTS))
        check_seed(self.seed)
        self._lengths = [positive_number("step_sizes", size) for size in self.step_sizes]
        self.step_sizes = tuple(str(size) for size in self.step_sizes)

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns for each subject the clean accuracy and a row for each setting."""
        # A model without features or kernel is refused before any work.
        for subject in subjects:
            attacks.Victim(subject.model).head_weights()
        return super().measure(subjects)

    def measure_one(self, subject: Subject) -> dict:
        """Returns the clean accuracy and a row for each setting."""
        clean = float((~subject.scored(subject.images).wrong).mean())
        return {"clean": clean, "rows": self._rows(subject)}

    def _rows(self, subject: Subject) -> list[dict]:
        rows = []
        for count in self.num_steps:
            for size, length in zip(self.step_sizes, self._lengths, strict=True):
                for start in self.starts:
                    setting = {"num_steps": count, "step_size": size, "start": start}
                    accuracies = {
                        label: self._accuracy(subject, label, count, length, STARTS[start])
                        for label in _OBJECTIVES
                    }
                    rows.append({**setting, **accuracies})
        return rows

    def _accuracy(self, subject: Subject, label: str, count: int, length: float, start) -> float:
        attack = attacks.get(
            f"{_OBJECTIVES[label]}-{count}",
            subject.threat,
            step_size=length,
            random_start=start,
            keep="last",
            stop_when_broken=False,
            seed=self.seed,
        )
        model = subject.model if label != _OWN_SCALE else _without_radial_gradient(subject.model)
        return attack(model, subject.images, subject.labels).robust_accuracy

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws a panel for each subject: a group of bars for each setting."""
        most = max(len(entry["rows"]) for entry in numbers.values())
        figure.set_size_inches(2.0 + 1.25 * most, 1.2 + 2.9 * len(numbers))
        panels = figure.subplots(len(numbers), 1, squeeze=False)[:, 0]
        for axes, (name, entry) in zip(panels, numbers.items(), strict=True):
            groups = [
                f"PGD-{row['num_steps']}\nstep {row['step_size']}\nfrom {row['start']}"
                for row in entry["rows"]
            ]
            series = {label: [100.0 * row[label] for row in entry["rows"]] for label in _OBJECTIVES}
            draw_bars(axes, groups, series)
            axes.tick_params(axis="x", labelsize=8)
            axes.set_ylabel("accuracy in %")
            axes.set_title(f"{name}: clean {entry['clean']:.1%}", fontsize=9)
        legend_below(figure, panels[0], 3)
        figure.suptitle("Feature norm (FN) in the adversarial objective only", fontsize=10)

    def table(self, numbers: Mapping) -> str:
        """Returns one line for each subject and setting."""
        lines = []
        for name, entry in numbers.items():
            lines.append(f"{name}: clean {entry['clean']:.1%}")
            labels = "".join(f"{label:>15}" for label in _OBJECTIVES)
            lines.append(f"{'K':>3}{'step':>8}{'start':>9}{labels}")
            for row in entry["rows"]:
                shares = "".join(f"{row[label]:>15.1%}" for label in _OBJECTIVES)
                lines.append(f"{row['num_steps']:>3}{row['step_size']:>8}{row['start']:>9}{shares}")
        return "\n".join(lines)


def _without_radial_gradient(model):
    """The same logits, whose gradient leaves the length of the features alone."""
    victim = attacks.Victim(model)

    def logits(images):
        features = victim.features(images)
        length = tf.stop_gradient(tf.norm(features, axis=1, keepdims=True))
        return victim.logits_of_features(length * normalize(features))

    return logits
