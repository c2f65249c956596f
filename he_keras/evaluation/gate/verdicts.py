"""The rules of the gate, and what each of them finds."""

import bisect
import dataclasses

from he_keras.arguments import is_number
from he_keras.evaluation.comparison import PairedCounts
from he_keras.evaluation.report.robustness_report import RobustnessReport
from he_keras.evaluation.statistics import mcnemar_interval

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        name: as on the command line.
        title: in a few words.
        text: what exactly is tested.
    """

    name: str
    title: str
    text: str


MIN_WORST_CASE = Rule(
    "min_worst_case",
    "Worst-case accuracy below the limit",
    "The share of these images that no attack breaks must be at least the limit. The share itself "
    "is compared, not an end of its interval.",
)
MAX_LOSS = Rule(
    "max_loss",
    "Loss against the baseline not shown to be small",
    "The upper end of the 95 % interval of the loss in worst-case accuracy must be at most the "
    "limit: a test of non-inferiority on the same images. If the interval contains the limit, the "
    "images are too few to decide, and the gate does not open.",
)
CHECKS = Rule("checks", "A check of the evaluation failed", "No check may fail.")
RULES = (MIN_WORST_CASE, MAX_LOSS, CHECKS)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a rule found.

    Attributes:
        rule: the rule.
        outcome: pass, fail or undecided; only "pass" opens the gate.
        message: the figures, and what they mean.
        numbers: the same figures as plain data.
    """

    rule: Rule
    outcome: str
    message: str
    numbers: dict

    def line(self) -> str:
        """Returns the verdict as a line of text."""
        return f"{self.outcome.upper()} ({self.rule.name}): {self.message}"


def check_limits(min_worst_case, max_loss, has_baseline: bool) -> None:
    """Raises a ValueError unless there is something to test, and with which."""
    if min_worst_case is None and max_loss is None:
        raise ValueError(
            "Nothing to test; expected min_worst_case, or max_loss with a baseline; received "
            "neither"
        )
    if (max_loss is not None) != has_baseline:
        received = "a baseline alone" if has_baseline else f"max_loss={max_loss} alone"
        raise ValueError(
            f"A loss is one against a baseline; expected both or neither; received {received}"
        )
    given = {"min_worst_case": min_worst_case, "max_loss": max_loss}
    for name, value in given.items():
        if value is not None and not (is_number(value) and 0 < value < 1):
            meant = f"; did you mean {value / 100:g}?" if _is_percent(value) else ""
            why = " (no loss at all cannot be shown on a sample)" if value == 0 else ""
            raise ValueError(
                f"Invalid {name}; expected a share above 0 and below 1, such as 0.01{why}; "
                f"received {name}={value!r}{meant}"
            )


def _is_percent(value) -> bool:
    return is_number(value) and 1 <= value < 100


def of_worst_case(report: RobustnessReport, limit: float) -> Verdict:
    """Compares the worst-case accuracy with a limit."""
    accuracy, (low, high) = report.worst_case, report.worst_case_interval
    text = (
        f"worst-case accuracy {accuracy:.2%}, 95 % interval {low:.2%} to {high:.2%}, "
        f"n = {report.num_examples}; at least {limit:.2%} asked."
    )
    if low < limit <= high:
        text += " The interval contains the limit: other images could give the other verdict."
    numbers = {"worst_case": accuracy, "interval": [low, high], "limit": limit}
    return Verdict(MIN_WORST_CASE, PASS if accuracy >= limit else FAIL, text, numbers)


def of_loss(pair: PairedCounts, limit: float) -> Verdict:
    """Tests the loss in worst-case accuracy; the first of the pair is the baseline."""
    lost, gained, loss = len(pair.only_first), len(pair.only_second), pair.difference
    low, high = pair.interval
    text = (
        f"loss {100 * loss:+.2f} points, 95 % interval {100 * low:+.2f} to {100 * high:+.2f}, "
        f"n = {pair.num_examples}, {lost} lost and {gained} gained; at most {100 * limit:+.2f} "
        f"allowed; p = {pair.p_value:.2g} that both are equal (McNemar)."
    )
    outcome = PASS if high <= limit else FAIL if low > limit else UNDECIDED
    if outcome == UNDECIDED:
        needed = examples_needed(lost, gained, pair.num_examples, limit)
        many = "No larger sample would show less" if needed is None else f"About {needed} would do"
        text += f" Too few images to decide. {many} if the models differ as here."
    numbers = {"loss": loss, "interval": [low, high], "limit": limit}
    counts = {"lost": lost, "gained": gained, "p_value": pair.p_value}
    return Verdict(MAX_LOSS, outcome, text, numbers | counts)


def examples_needed(lost: int, gained: int, total: int, limit: float) -> int | None:
    """Returns how many examples would show a loss of at most `limit`, all else being alike.

    None if the loss is not below it here, so that no number of examples would.

    Example:
        >>> from he_keras.evaluation.gate.verdicts import examples_needed
        >>> examples_needed(lost=0, gained=0, total=100, limit=0.01)
        368
    """
    if lost - gained >= limit * total:
        return None

    def shows(count: int) -> bool:
        scaled = round(lost * count / total), round(gained * count / total)
        return mcnemar_interval(scaled[0], scaled[1], count)[1] <= limit

    most = total
    while not shows(most):
        most *= 2
    fewest = bisect.bisect_left(range(most + 1), True, lo=total, key=shows)
    return min(fewest, most)


def of_checks(report: RobustnessReport) -> Verdict:
    """Says whether a check of the evaluation failed."""
    failed = [check for check in report.checks if check.verdict == "fail"]
    text = f"{len(report.checks)} checks, {len(failed)} failed."
    text = " ".join([text, *(f"{each.name}: {each.figure}. {each.message}" for each in failed)])
    numbers = {"checks": len(report.checks), "failed": [each.name for each in failed]}
    return Verdict(CHECKS, FAIL if failed else PASS, text, numbers)
