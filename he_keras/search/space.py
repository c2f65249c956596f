"""What is searched: ranges or lists of values of a few numbers of an experiment."""

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from he_keras.arguments import unknown_name

SAMPLINGS = ("linear", "log")
#: Smallest value of each number that can be searched, and whether it may be that value itself.
_LIMITS = {
    "scale": (0.0, False),
    "margin": (0.0, True),
    "learning_rate": (0.0, False),
    "weight_decay": (0.0, True),
    "beta": (0.0, True),
}
NAMES = tuple(_LIMITS)
# What tables and configuration files show is what was trained with.
_DIGITS = 6


class Range(NamedTuple):
    """Every number between two limits."""

    low: float
    high: float
    sampling: str


class Space:
    """The numbers that are searched, with their ranges or values; or a list of points.

    Args:
        settings: for each name a range "5:30" or "5:30:log", or values "1,5,10" or [1, 5, 10]. For
            the grid it may also be a sequence of points, each a value for every name.

    Example:
        >>> from he_keras.search import Space
        >>> Space({"scale": "5:30:log", "margin": "0,0.2"}).entries["margin"]
        (0.0, 0.2)
        >>> len(Space({"scale": [5, 10, 15], "margin": [0, 0.2]}).grid())
        6
    """

    def __init__(self, settings: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self.points: tuple[dict[str, float], ...] = ()
        if not isinstance(settings, Mapping):
            self.points = _points(settings)
            settings = {name: _column(name, self.points) for name in self.points[0]}
        if not settings:
            raise ValueError(f"Nothing to search; expected some of {NAMES}; received none")
        self.entries: dict[str, Range | tuple[float, ...]] = {
            name: _entry(name, setting) for name, setting in settings.items()
        }

    def declare(self, hyperparameters) -> dict[str, float]:
        """Registers the space in a keras-tuner `HyperParameters`; returns the values it holds."""
        for name, entry in self.entries.items():
            if isinstance(entry, Range):
                hyperparameters.Float(name, entry.low, entry.high, sampling=entry.sampling)
            else:
                hyperparameters.Choice(name, list(entry))
        return self.values(hyperparameters.values)

    def values(self, hyperparameters: Mapping[str, Any]) -> dict[str, float]:
        """Picks the values of this space, rounded to six digits as they are shown."""
        return {name: _rounded(hyperparameters[name]) for name in self.entries}

    def grid(self) -> list[dict[str, float]]:
        """Returns every point: those listed, or all combinations of the values."""
        if self.points:
            return [dict(point) for point in self.points]
        columns = {
            name: entry for name, entry in self.entries.items() if not isinstance(entry, Range)
        }
        ranges = [name for name in self.entries if name not in columns]
        if ranges:
            raise ValueError(
                "A grid needs values; expected a list such as scale=5,10,15; received a range of "
                f"{', '.join(ranges)}"
            )
        combinations = itertools.product(*columns.values())
        return [dict(zip(columns, each, strict=True)) for each in combinations]

    def corners(self) -> list[dict[str, float]]:
        """Returns points that together hold every limit and every value, for checks."""
        if self.points:
            return self.grid()
        columns = {name: _ends(entry) for name, entry in self.entries.items()}
        longest = max(map(len, columns.values()))
        return [
            {name: column[min(row, len(column) - 1)] for name, column in columns.items()}
            for row in range(longest)
        ]

    def to_plain(self) -> dict | list:
        """Returns the space as JSON-compatible data, in the form that the constructor takes."""
        if self.points:
            return self.grid()
        return {
            name: f"{entry.low!r}:{entry.high!r}:{entry.sampling}"
            if isinstance(entry, Range)
            else list(entry)
            for name, entry in self.entries.items()
        }


def _points(settings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], ...]:
    if isinstance(settings, str) or not all(isinstance(each, Mapping) for each in settings):
        raise TypeError(
            "Invalid space; expected {name: range or values} or a sequence of points; received "
            f"{settings!r}"
        )
    names = set(settings[0]) if settings else set()
    if not names or any(set(each) != names for each in settings):
        raise ValueError(
            "Invalid points; expected at least one, and the same names in each; received "
            f"{list(settings)!r}"
        )
    points = tuple({name: _number(name, point[name]) for name in point} for point in settings)
    if any(point in points[:number] for number, point in enumerate(points)):
        raise ValueError(f"Points must differ; expected none twice; received {list(points)}")
    return points


def _column(name: str, points: Sequence[Mapping[str, float]]) -> list[float]:
    return sorted({point[name] for point in points})


def _entry(name: str, setting) -> Range | tuple[float, ...]:
    if name not in _LIMITS:
        raise unknown_name("hyperparameter", name, NAMES)
    if isinstance(setting, str) and ":" in setting:
        return _range(name, setting)
    parts = setting.split(",") if isinstance(setting, str) else setting
    if isinstance(parts, numbers.Real):
        parts = [parts]
    if not isinstance(parts, Sequence):
        raise TypeError(
            f'Invalid space of {name}; expected "low:high", "low:high:log" or values; received '
            f"{name}={setting!r}"
        )
    values = tuple(_number(name, part) for part in parts)
    if not values or len(set(values)) != len(values):
        raise ValueError(
            f"Invalid values of {name}; expected at least one, none twice; received "
            f"{name}={setting!r}"
        )
    return values


def _range(name: str, text: str) -> Range:
    low, high, sampling, *rest = [*text.split(":"), "linear"]
    if rest not in ([], ["linear"]) or sampling not in SAMPLINGS:
        raise ValueError(
            f"Invalid range of {name}; expected low:high or low:high:log; received {name}={text}"
        )
    found = Range(_number(name, low), _number(name, high), sampling)
    if not found.low < found.high:
        raise ValueError(f"Empty range of {name}; expected low < high; received {name}={text}")
    if sampling == "log" and found.low <= 0:
        raise ValueError(
            f"A logarithmic range begins above 0; expected low > 0; received {name}={text}"
        )
    return found


def _number(name: str, value) -> float:
    if name not in _LIMITS:
        raise unknown_name("hyperparameter", name, NAMES)
    minimum, inclusive = _LIMITS[name]
    try:
        number = math.nan if isinstance(value, bool) else _rounded(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or not (number > minimum or (inclusive and number == minimum)):
        sign = ">=" if inclusive else ">"
        raise ValueError(
            f"Invalid {name}; expected a finite number {sign} {minimum:g}; received {name}={value}"
        )
    return number


def _ends(entry: Range | tuple[float, ...]) -> list[float]:
    return [entry.low, entry.high] if isinstance(entry, Range) else list(entry)


def _rounded(value) -> float:
    return float(f"{float(value):.{_DIGITS}g}")
