"""The curve of accuracy over epsilon, as inline SVG with its numbers in a table below."""

import math

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import (
    Column,
    number,
    paragraphs,
    row,
    scroll_box,
    table,
)

_WIDTH, _HEIGHT = 560, 300
# Room for the larger words of a phone.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 16, 56
_NICE_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def epsilon_curve(source: ReportSource) -> Section | None:
    """How accuracy falls as the attacker may do more."""
    curve = source.report.get("epsilon_curve")
    points = [
        (float(point["epsilon"]), float(point["accuracy"]))
        for point in (curve or {}).get("points") or []
        if formatting.is_number(point.get("epsilon"))
        and formatting.is_number(point.get("accuracy"))
    ]
    if not curve or not points:
        return None
    points.sort()
    size, attack = formatting.count(curve.get("num_examples")), curve.get("attack")
    intro = paragraphs(
        f"Accuracy under {attack} on {size} examples. It must fall as epsilon grows, and reach "
        "zero for a large epsilon: if it does not, the attack fails to find what is there."
    )
    drawing = tag(
        "figure",
        scroll_box(_chart(source, points), "curve-caption"),
        tag(
            "figcaption",
            f"Accuracy under {attack} over epsilon. Dashed: the epsilon of this report, and the "
            "accuracy of guessing.",
            id="curve-caption",
        ),
    )
    body = join([intro, drawing, _numbers(source, points)])
    return Section("epsilon-curve", "Accuracy over epsilon", body)


def _chart(source: ReportSource, points: list[tuple[float, float]]) -> Html:
    threat = source.report["threat"]
    unit, unit_name = _unit(threat)
    highest = max(points[-1][0], 1e-12)

    def place(epsilon: float, accuracy: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * epsilon / highest
        return round(across, 1), round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - accuracy), 1)

    path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
    parts = [
        tag("title", "Accuracy over epsilon", id="curve-title"),
        tag("desc", _description(threat, points), id="curve-description"),
        *_axes(place, highest, unit, unit_name),
        *_references(source, place, highest),
        tag("polyline", points=path, class_="curve"),
    ]
    for epsilon, accuracy in points:
        x, y = place(epsilon, accuracy)
        parts.append(tag("circle", cx=x, cy=y, r="3.5", class_="dot"))
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby="curve-title curve-description",
        class_="chart",
    )


def _unit(threat: dict) -> tuple[float, str]:
    """The unit of the epsilon axis: 1/255 where pixels run from 0 to 1 and the norm is L∞."""
    if threat.get("norm") == "linf" and list(threat.get("bounds") or ()) == [0, 1]:
        return 1.0 / 255.0, "ε in units of 1/255"
    return 1.0, f"ε ({formatting.norm_name(threat.get('norm'))})"


def _axes(place, highest: float, unit: float, unit_name: str) -> list[Html]:
    parts = []
    for accuracy in (0.0, 0.25, 0.5, 0.75, 1.0):
        (left, y), (right, _) = place(0.0, accuracy), place(highest, accuracy)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        words = formatting.percent(accuracy, 0)
        parts.append(tag("text", words, x=left - 8, y=y + 4, text_anchor="end"))
    for tick in _ticks(highest / unit):
        x, y = place(tick * unit, 0.0)
        parts.append(tag("line", x1=x, x2=x, y1=y, y2=y + 5, class_="axis"))
        parts.append(tag("text", f"{tick:g}", x=x, y=y + 22, text_anchor="middle"))
    middle, bottom = place(highest / 2, 0.0)
    parts.append(
        tag("text", unit_name, x=middle, y=bottom + 46, text_anchor="middle", class_="axis-title")
    )
    return parts


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to `highest`, at most seven."""
    rough = highest / 6.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in _NICE_STEPS if nice * power >= rough * (1 - 1e-9))
    return [round(k * step, 12) for k in range(int(highest / step * (1 + 1e-9)) + 1)]


def _references(source: ReportSource, place, highest: float) -> list[Html]:
    """Lines for the threat model's epsilon and for guessing."""
    parts = []
    epsilon = source.report["threat"].get("epsilon")
    if formatting.is_number(epsilon) and epsilon <= highest:
        (x, top), (_, bottom) = place(epsilon, 1.0), place(epsilon, 0.0)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="reference"))
        # On the side with more room.
        near_right = epsilon > 0.7 * highest
        anchor, shift = ("end", -6) if near_right else ("start", 6)
        words = "ε of this report"
        parts.append(tag("text", words, x=x + shift, y=top + 12, text_anchor=anchor))
    if source.num_classes > 1:
        chance = 1.0 / source.num_classes
        (left, y), (right, _) = place(0.0, chance), place(highest, chance)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="reference"))
        parts.append(tag("text", "guessing", x=right, y=y - 5, text_anchor="end"))
    return parts


def _description(threat: dict, points: list[tuple[float, float]]) -> str:
    (first, at_first), (last, at_last) = points[0], points[-1]
    return (
        f"A line through {len(points)} points in the norm "
        f"{formatting.norm_name(threat.get('norm'))}: accuracy is {formatting.percent(at_first)} "
        f"at epsilon {formatting.significant(first)} and {formatting.percent(at_last)} at epsilon "
        f"{formatting.significant(last)}. The table below has every point."
    )


def _numbers(source: ReportSource, points: list[tuple[float, float]]) -> Html:
    bounds = source.report["threat"].get("bounds")
    linf = source.report["threat"].get("norm") == "linf"
    rows = []
    for epsilon, accuracy in points:
        fraction = formatting.epsilon_in_pixels(epsilon, bounds) if linf else None
        plain = formatting.significant(epsilon)
        rows.append(
            row(
                number(f"{fraction} ({plain})" if fraction else plain, epsilon),
                number(formatting.percent(accuracy), accuracy),
            )
        )
    shown = table(
        "curve-table", "Points of the curve", (Column("Epsilon"), Column("Accuracy")), [rows]
    )
    return tag("details", tag("summary", "The numbers behind the curve"), shown)
