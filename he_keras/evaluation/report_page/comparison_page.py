"""The page that compares runs: accuracies side by side, then every two of them in detail."""

import numpy as np

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.page import page
from he_keras.evaluation.report_page.paired_runs import (
    CLEAN,
    WORST_CASE,
    ComparedRun,
    Comparison,
    PairedCounts,
)
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.tables import (
    Column,
    accuracy_bar,
    cell,
    number,
    paragraphs,
    row,
    row_header,
    table,
)

#: Positions listed on the page; the JSON file beside it has all.
MAX_POSITIONS = 100


def comparison_page(comparison: Comparison, data_name: str) -> str:
    """Returns the document.

    Args:
        comparison: what to show.
        data_name: name of the file with all positions.
    """
    letters = [(run.letter, run) for run in comparison.runs]
    sections = [_runs(comparison), _accuracies(comparison)]
    for position, (first, first_run) in enumerate(letters):
        for second, second_run in letters[position + 1 :]:
            pairs = [
                pair for pair in comparison.pairs if (pair.first, pair.second) == (first, second)
            ]
            sections.append(_pair_section(pairs, first_run, second_run, data_name))
    report = comparison.runs[0].source.report
    remarks = [
        formatting.threat_text(report["threat"]),
        f"n = {formatting.count(report['num_examples'])}, the same for every run",
    ]
    title = " and ".join(_title(run) for run in comparison.runs[:2])
    more = len(comparison.runs) - 2
    title += f" and {more} more" if more > 0 else ""
    return page("Comparison of robustness", title, remarks, sections)


def _title(run: ComparedRun) -> str:
    return str(run.source.report.get("title") or run.source.folder.name)


def _runs(comparison: Comparison) -> Section:
    rows = []
    for run in comparison.runs:
        report = run.source.report
        checks = report.get("checks") or []
        bad = [
            f"{sum(check.get('verdict') == verdict for check in checks)} {word}"
            for verdict, word in (("fail", "failed"), ("warn", "warned"))
        ]
        rows.append(
            row(
                row_header(run.letter),
                cell(_title(run)),
                cell(tag("code", run.source.folder)),
                cell(formatting.moment(report.get("created")) or formatting.MISSING),
                cell(", ".join(bad) if checks else "none ran"),
                cell(report.get("protocol") or formatting.MISSING),
            )
        )
    names = ("Run", "Title", "Folder", "Evaluated", "Checks", "Protocol")
    columns = [Column(name, numeric=False) for name in names]
    notes = [tag("p", note, class_="callout warn") for note in comparison.notes]
    shown = table("run-table", "The runs", columns, [rows])
    return Section("runs", "Runs", join([_verdict(comparison), *notes, shown]))


def _verdict(comparison: Comparison) -> Html:
    """One sentence for each two runs: what the paired test says about the worst case."""
    sentences = []
    for pair in comparison.pairs:
        if pair.criterion != WORST_CASE:
            continue
        better, worse = pair.first, pair.second
        if pair.difference < 0:
            better, worse = worse, better
        gap = f"{100 * abs(pair.difference):.2f} percentage points"
        p_value = f"p {_p_text(pair.p_value, with_sign=True)}"
        if pair.p_value < 0.05:
            words = f"{better} holds {gap} more than {worse} in the worst case ({p_value})."
        else:
            words = (
                f"The worst cases of {pair.first} and {pair.second} differ by {gap}, which can be "
                f"chance ({p_value})."
            )
        sentences.append(tag("p", words, class_="lede"))
    return join(sentences)


def _accuracies(comparison: Comparison) -> Section:
    criteria = list(dict.fromkeys(name for run in comparison.runs for name in run.holds))
    columns = [
        Column("Accuracy", numeric=False),
        *(Column(f"{run.letter}: {_title(run)}") for run in comparison.runs),
    ]
    rows = [
        row(row_header(name), *(_accuracy_cell(run, name) for run in comparison.runs))
        for name in criteria
    ]
    caption = "Share of all examples that are classified correctly, with 95% intervals"
    reading = paragraphs(
        "Intervals may overlap although the difference is certain, because the runs share their "
        "examples: the paired tests below decide."
    )
    shown = table("accuracy-table", caption, columns, [rows], sortable=True)
    return Section("accuracies", "Accuracies", join([reading, shown]))


def _accuracy_cell(run: ComparedRun, criterion: str) -> Html:
    if criterion not in run.holds:
        return number("not run")
    report = run.source.report
    attacks = {attack["name"]: attack.get("interval") for attack in report["attacks"]}
    bounds = {
        CLEAN: report["clean_interval"],
        WORST_CASE: report["worst_case_interval"],
    }.get(criterion, attacks.get(criterion))
    share = float(run.holds[criterion].mean())
    interval = tag("span", formatting.interval(bounds), class_="below")
    content = join([accuracy_bar(share, bounds), tag("span", formatting.percent(share)), interval])
    return number(content, share, "with-interval")


def _pair_section(
    pairs: list[PairedCounts], first: ComparedRun, second: ComparedRun, data_name: str
) -> Section:
    a, b = first.letter, second.letter
    columns = (
        Column("Accuracy", numeric=False),
        Column("Both hold"),
        Column(f"Only {a} holds"),
        Column(f"Only {b} holds"),
        Column("Both broken"),
        Column(f"{a} minus {b}, points"),
        Column("p"),
    )
    rows = [_pair_row(pair) for pair in pairs]
    caption = f"Examples that {a} and {b} hold; p of McNemar's exact two-sided test"
    shown = table(f"pair-{a}-{b}", caption, columns, [rows], sortable=True)
    reading = paragraphs(
        f"{a} is {_title(first)}, {b} is {_title(second)}. Only the examples count that one holds "
        "and the other does not: p is the probability of a split at least as uneven if neither "
        f"were better. It is not corrected for the {len(pairs)} tests in this table."
    )
    lists = [_positions(pair, data_name) for pair in pairs]
    return Section(f"{a}-{b}", f"{a} and {b}", join([reading, shown, *lists]))


def _pair_row(pair: PairedCounts) -> Html:
    counts = pair.both_hold, len(pair.only_first), len(pair.only_second), pair.both_broken
    return row(
        row_header(pair.criterion),
        *(number(formatting.count(each), each) for each in counts),
        number(formatting.points(pair.difference), pair.difference),
        number(_p_text(pair.p_value), pair.p_value),
    )


def _p_text(p_value: float, with_sign: bool = False) -> str:
    if p_value < 1e-4:
        return "< 0.0001"
    return f"= {p_value:.2g}" if with_sign else f"{p_value:.2g}"


def _positions(pair: PairedCounts, data_name: str) -> Html | None:
    """Which examples one run holds and the other does not."""
    if not len(pair.only_first) and not len(pair.only_second):
        return None
    parts = [
        _position_list(f"Held by {pair.first}, broken in {pair.second}", pair.only_first),
        _position_list(f"Held by {pair.second}, broken in {pair.first}", pair.only_second),
    ]
    longest = max(len(pair.only_first), len(pair.only_second))
    if longest > MAX_POSITIONS:
        parts.append(tag("p", "All of them are in ", tag("code", data_name), ".", class_="remark"))
    summary = tag("summary", f"Which examples differ: {pair.criterion}")
    return tag("details", summary, *parts, open=pair.criterion == WORST_CASE)


def _position_list(title: str, positions: np.ndarray) -> Html:
    shown = ", ".join(map(str, positions[:MAX_POSITIONS].tolist())) or "none"
    size = formatting.count(len(positions))
    if len(positions) > MAX_POSITIONS:
        size = f"the first {MAX_POSITIONS} of {size}"
    return tag("p", tag("b", f"{title} ({size}): "), shown, class_="positions")
