"""Where the curve of accuracy over epsilon has its lines, ticks and points, for the template."""

import math
from collections.abc import Sequence

from he_keras.evaluation.report import formatting

_WIDTH, _HEIGHT = 560, 300
# Room for the larger words of a phone.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 16, 56
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def places_on_chart(
    points: Sequence[tuple[float, float]], threat: dict, num_classes: int
) -> tuple[dict, list[dict]]:
    """Returns the places of all lines and words on the chart in pixels, and those of the points.

    Args:
        points: pairs of epsilon and accuracy, the smallest epsilon first.
        threat: the report's threat model.
        num_classes: how many there are; their inverse is the accuracy of guessing.
    """
    # A single point at 0 is a curve also.
    highest = max(points[-1][0], 1e-12)
    stored = threat.get("epsilon")
    epsilon: float = stored if stored is not None and formatting.is_number(stored) else math.inf
    is_255 = threat.get("norm") == "linf" and list(threat.get("bounds") or ()) == [0, 1]
    unit = 1.0 / 255.0 if is_255 else 1.0

    def across(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / highest, 1)

    def down(accuracy: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - accuracy), 1)

    shows_epsilon = epsilon <= highest
    chart = {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": across(0.0),
        "middle": across(highest / 2),
        "right": across(highest),
        "top": down(1.0),
        "bottom": down(0.0),
        "in_units_of_255": is_255,
        "grid": [{"accuracy": accuracy, "y": down(accuracy)} for accuracy in _GRID],
        "ticks": [
            {"label": f"{tick:g}", "x": across(tick * unit)} for tick in _ticks(highest / unit)
        ],
        "epsilon_x": across(epsilon) if shows_epsilon else None,
        "epsilon_is_near_right": shows_epsilon and epsilon > 0.7 * highest,
        "guessing_y": down(1.0 / num_classes) if num_classes > 1 else None,
    }
    shown = [
        {"epsilon": value, "accuracy": accuracy, "x": across(value), "y": down(accuracy)}
        for value, accuracy in points
    ]
    return chart, shown


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to `highest`, at most seven."""
    rough = highest / 6.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in _ROUND_STEPS if size * power >= rough * (1 - 1e-9))
    return [round(k * step, 12) for k in range(int(highest / step * (1 + 1e-9)) + 1)]
