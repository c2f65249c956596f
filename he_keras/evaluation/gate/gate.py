"""Evaluates a model, tests it against limits and a baseline, and writes the files for CI."""

import dataclasses
import pathlib

from he_keras.evaluation.comparison import WORST_CASE, compare
from he_keras.evaluation.gate import ci_files
from he_keras.evaluation.gate.baseline import CHEAP, Baseline, read_baseline
from he_keras.evaluation.gate.verdicts import (
    PASS,
    Verdict,
    check_limits,
    of_checks,
    of_loss,
    of_worst_case,
)
from he_keras.evaluation.report.robustness_report import RobustnessReport
from he_keras.evaluation.robustness import evaluate_robustness
from he_keras.evaluation.run.examples import Examples
from he_keras.files import read_json
from he_keras.threat import ThreatModel


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
    recorded settings, else `screen`. Each attack runs on what all before it left, because only the
    worst case counts. `docs/gate.md` has the rules.

    Args:
        model: a `keras.Model` or a callable `images -> logits`.
        examples: as for `evaluate_robustness`.
        threat: the threat model.
        output_dir: folder for the report and the files.
        min_worst_case: the worst-case accuracy on these images must be at least this.
        baseline: an earlier evaluation on the same images, or its folder.
        max_loss: how much worst-case accuracy may be lost against the baseline; the upper end of
            the 95 % interval of the loss must be at most this.
        attacks: names or `Attack` objects; with a baseline the names of its attacks, which allows
            them to cost more than `screen`.
        batch_size: examples per compiled call.
        checks: run the checks too; one that fails closes the gate.
        show_progress: show a progress bar.
        subject: file of the model, for the files.
    """
    check_limits(min_worst_case, max_loss, baseline is not None)
    chosen = attacks or (CHEAP,)
    if baseline is not None:
        baseline = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
        _check_other_folder(baseline, pathlib.Path(output_dir))
        baseline.check_fits(threat, Examples(threat, examples, batch_size))
        chosen = baseline.attacks(attacks, batch_size)
    report = evaluate_robustness(
        model,
        examples,
        threat,
        chosen,
        output_dir,
        batch_size,
        mode="survivors",
        checks=checks,
        panel=False,
        show_progress=show_progress,
    )
    folder = pathlib.Path(output_dir)
    verdicts = []
    if min_worst_case is not None:
        verdicts.append(of_worst_case(report, min_worst_case))
    if baseline is not None and max_loss is not None:
        pairs = compare([baseline.folder, folder]).pairs
        pair = next(each for each in pairs if each.criterion == WORST_CASE)
        verdicts.append(of_loss(pair, max_loss))
    if checks:
        verdicts.append(of_checks(report))
    files = _write(folder, report, verdicts, subject, baseline)
    return GateResult(report, tuple(verdicts), files)


def _check_other_folder(baseline: Baseline, folder: pathlib.Path) -> None:
    if folder.resolve() == baseline.folder.resolve():
        raise ValueError(
            "The gate writes an evaluation of its own; expected an output_dir other than the "
            f"baseline's; received {folder} for both"
        )


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
