"""Evaluates a model, tests it against limits and a baseline, and writes the files for CI."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

from he_keras.attacks import Attack, get
from he_keras.evaluation.comparison import WORST_CASE, PairedCounts
from he_keras.evaluation.gate import ci_files
from he_keras.evaluation.gate.verdicts import (
    PASS,
    Verdict,
    check_limits,
    of_checks,
    of_loss,
    of_worst_case,
)
from he_keras.evaluation.report.comparison_report import compare
from he_keras.evaluation.report.robustness_report import (
    RobustnessReport,
    StoredReport,
    read_report,
)
from he_keras.evaluation.robustness import evaluate_robustness
from he_keras.evaluation.run.examples import PREFIX, DataDigest, Examples
from he_keras.files import read_json
from he_keras.threat import ThreatModel

#: What an evaluation costs at most unless its attacks are asked for by name.
CHEAP = "fast"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """An evaluation to compare with.

    Attributes:
        source: its files.
        prepare: called with its attacks when they are built.
    """

    source: StoredReport
    prepare: Callable[[list[Attack]], object] = lambda attacks: None

    @property
    def folder(self) -> pathlib.Path:
        """Where it lies."""
        return self.source.folder

    @property
    def num_examples(self) -> int:
        """How many examples it has."""
        return self.source.report["num_examples"]

    @property
    def threat(self) -> ThreatModel:
        """Its threat model."""
        return ThreatModel(**self.source.report["threat"])

    @property
    def attack_names(self) -> list[str]:
        """Its attacks."""
        return [row["name"] for row in self.source.report["attacks"]]

    def attacks(self, asked, batch_size: int) -> list[Attack]:
        """Builds its attacks with the settings that it has recorded.

        Weaker attacks would make any model look better than the baseline, so there is no choice.

        Args:
            asked: their names, if the caller has named them; else they must be cheap.
            batch_size: of the new evaluation.
        """
        names = self.attack_names
        if asked is not None and [str(each).lower() for each in asked] != [
            name.lower() for name in names
        ]:
            raise ValueError(
                f"Other attacks than the baseline's; expected {','.join(names)}, as in "
                f"{self.folder}; received {','.join(map(str, asked))}"
            )
        rows = self.source.report["attacks"]
        attacks = [self._attack(row, batch_size) for row in rows]
        cost, cheap = map(self._passes, (attacks, [get(CHEAP, self.threat)]))
        if asked is None and cost > cheap:
            raise ValueError(
                f"The baseline's attacks cost more than {CHEAP}; expected at most {cheap} passes "
                f"an image; received {cost}: allow them by their names, {','.join(names)}, or "
                f"evaluate the baseline with {CHEAP}"
            )
        self.prepare(attacks)
        return attacks

    def _attack(self, row: dict, batch_size: int) -> Attack:
        try:
            kind = type(get(row["name"], self.threat))
            settings = {**row["settings"], "threat": self.threat, "batch_size": batch_size}
            return kind.from_config(settings)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "An attack of the baseline cannot be built again; expected one known by its name "
                f"with its settings; received {row['name']} in {self.folder}: {error}"
            ) from error

    def _passes(self, attacks) -> int:
        return sum(attack.most_passes(self.source.num_classes) for attack in attacks)

    def check_fits(self, threat: ThreatModel, examples: Examples) -> None:
        """Raises a ValueError unless the baseline is of this threat model and of these images."""
        if self.threat != threat:
            raise ValueError(
                f"The baseline has another threat model; expected {threat.text()}; received "
                f"{self.threat.text()} in {self.folder}"
            )
        recorded = str((self.source.report.get("settings") or {}).get("data"))
        if not recorded.startswith(PREFIX):
            raise ValueError(
                "The baseline does not say which images it is about; expected a report of this "
                f"version of he_keras; received {self.folder}: evaluate it again"
            )
        digest, count = DataDigest(), 0
        for images, labels in examples:
            digest.update(images, labels)
            count += len(labels)
        if digest.text() != recorded:
            raise ValueError(
                f"The baseline is of other images; expected these {count} images in this order; "
                f"received {self.num_examples} others in {self.folder}"
            )


def read_baseline(path) -> Baseline:
    """Reads an evaluation.

    Args:
        path: its folder, its report.json, or the run folder that it belongs to.
    """
    folder = pathlib.Path(path)
    if folder.name == "report.json":
        folder = folder.parent
    if not (folder / "report.json").exists() and (folder / "evaluation").is_dir():
        folder = folder / "evaluation"
    return Baseline(read_report(folder, with_gallery=False))


@dataclasses.dataclass(frozen=True)
class GateResult:
    """The result of `run_gate`.

    Attributes:
        report: the evaluation.
        verdicts: one for each rule.
        files: JUnit XML and SARIF.
    """

    report: RobustnessReport
    verdicts: tuple[Verdict, ...]
    files: tuple[pathlib.Path, ...]

    @property
    def passed(self) -> bool:
        """Whether every rule passed."""
        return all(verdict.outcome == PASS for verdict in self.verdicts)

    def summary(self) -> str:
        """Returns the verdicts as lines of text."""
        closed = [verdict.rule.name for verdict in self.verdicts if verdict.outcome != PASS]
        end = (
            "Gate: passed." if self.passed else f"Gate: NOT passed, because of {', '.join(closed)}."
        )
        return "\n".join([*(verdict.line() for verdict in self.verdicts), end])


def run_gate(
    model,
    examples,
    threat: ThreatModel,
    output_dir,
    min_worst_case: float | None = None,
    baseline: Baseline | str | pathlib.Path | None = None,
    max_loss: float | None = None,
    attacks=None,
    batch_size: int = 250,
    checks: bool = False,
    show_progress: bool = False,
    subject: str = "model",
) -> GateResult:
    """Tests a model, and writes report, JUnit XML and SARIF.

    It goes on where an interrupted call stopped. It runs the attacks of the baseline with their
    recorded settings, else `fast`, each on what all before it left: only the worst case counts.
    `docs/how-to/gate.md` has the rules.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: as for `evaluate_robustness`.
        threat: the threat model.
        output_dir: folder for the report and the files.
        min_worst_case: the worst-case accuracy on these images must be at least this.
        baseline: an earlier evaluation on the same images, or its folder.
        max_loss: the 95 % interval of the loss against the baseline must end below this.
        attacks: names or `Attack` objects; with a baseline its own, which may then cost more.
        batch_size: examples per compiled call.
        checks: run the checks too; one that fails closes the gate.
        show_progress: show a progress bar.
        subject: file of the model, for the files.
    """
    check_limits(min_worst_case, max_loss, baseline is not None)
    chosen, folder = attacks or (CHEAP,), pathlib.Path(output_dir)
    if baseline is not None:
        baseline = _fitting(baseline, threat, Examples(threat, examples, batch_size), folder)
        chosen = baseline.attacks(attacks, batch_size)
    evaluate = functools.partial(evaluate_robustness, mode="survivors", checks=checks, panel=False)
    report = evaluate(
        model, examples, threat, chosen, folder, batch_size, show_progress=show_progress
    )
    verdicts = [] if min_worst_case is None else [of_worst_case(report, min_worst_case)]
    if baseline is not None and max_loss is not None:
        verdicts.append(of_loss(_pair(baseline, folder), max_loss))
    if checks:
        verdicts.append(of_checks(report))
    files = _write(folder, report, verdicts, subject, baseline)
    return GateResult(report, tuple(verdicts), files)


def _pair(baseline: Baseline, folder: pathlib.Path) -> PairedCounts:
    """The worst cases of the baseline and of the evaluation, example by example."""
    pairs = compare([baseline.folder, folder]).pairs
    return next(pair for pair in pairs if pair.criterion == WORST_CASE)


def _fitting(baseline, threat: ThreatModel, examples: Examples, folder: pathlib.Path) -> Baseline:
    """Reads the baseline if need be, and checks that it can be compared with."""
    baseline = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
    if folder.resolve() == baseline.folder.resolve():
        raise ValueError(
            "The gate writes an evaluation of its own; expected an output_dir other than the "
            f"baseline's; received {folder} for both"
        )
    baseline.check_fits(threat, examples)
    return baseline


def _write(
    folder: pathlib.Path, report: RobustnessReport, verdicts, subject: str, baseline
) -> tuple[pathlib.Path, ...]:
    facts = _facts(folder, subject, baseline)
    warnings = [f"{row.name}: {text}" for row in report.rows for text in row.warnings]
    seconds = sum(row.seconds for row in report.rows)
    junit = ci_files.write_junit(folder, verdicts, facts, seconds, report.table())
    return junit, ci_files.write_sarif(folder, verdicts, facts, warnings, subject)


def _facts(folder: pathlib.Path, subject: str, baseline: Baseline | None) -> dict[str, str]:
    """What the verdicts can be traced by."""
    stored = read_json(folder / "report.json")
    versions = {name: stored["environment"].get(name) for name in ("he_keras", "keras")}
    return {
        "model": subject,
        "weights": str((stored["settings"]["model"] or {}).get("weights")),
        "data": stored["settings"]["data"],
        "num_examples": str(stored["num_examples"]),
        "threat": ThreatModel(**stored["threat"]).text(),
        "attacks": ",".join(row["name"] for row in stored["attacks"]),
        "clean_accuracy": f"{stored['clean_accuracy']:.6g}",
        "worst_case": f"{stored['worst_case']:.6g}",
        "baseline": str(baseline.folder) if baseline else "none",
        **{name: str(version) for name, version in versions.items()},
    }
