"""Numbers as the page shows them; what is missing or not finite shows as a dash."""

import datetime
import math

from he_keras.threat import fraction_of_255

MISSING = "–"
_NORM_NAMES = {"linf": "L∞", "l2": "L2", "l1": "L1"}


def is_number(value) -> bool:
    """True for a finite number; None, NaN, infinity and text are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_interval(bounds) -> bool:
    """True for a pair of finite numbers."""
    return bool(bounds) and len(bounds) == 2 and all(map(is_number, bounds))


def percent(share, decimals: int = 2) -> str:
    """0.5261 -> 52.61%."""
    return f"{100.0 * share:.{decimals}f}%" if is_number(share) else MISSING


def points(difference) -> str:
    """A difference of two shares in percentage points, with its sign."""
    if not is_number(difference):
        return MISSING
    return f"{100.0 * difference:+.2f}".replace("-", "−")


def interval(bounds) -> str:
    """[0.516, 0.5359] -> 51.60 to 53.59%."""
    if not is_interval(bounds):
        return MISSING
    low, high = bounds
    return f"{100.0 * low:.2f} to {100.0 * high:.2f}%"


def count(number) -> str:
    """10000 -> 10,000."""
    return f"{number:,.0f}" if is_number(number) else MISSING


def passes(number) -> str:
    """Mean number of passes for one example: whole where it is large."""
    if not is_number(number):
        return MISSING
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"


def significant(number, digits: int = 4) -> str:
    """A distance or a margin, with a true minus sign."""
    return f"{number:.{digits}g}".replace("-", "−") if is_number(number) else MISSING


def duration(seconds) -> str:
    """75 -> 1 min 15 s."""
    if not is_number(seconds):
        return MISSING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(written) -> str | None:
    """An ISO 8601 date and time as people write it, in UTC; other text as it is."""
    try:
        parsed = datetime.datetime.fromisoformat(written)
    except (TypeError, ValueError):
        return None if written is None else str(written)
    if parsed.tzinfo is None:
        return parsed.strftime("%Y-%m-%d %H:%M")
    return parsed.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def norm_name(norm) -> str:
    """The norm as mathematicians write it."""
    return _NORM_NAMES.get(norm, str(norm))


def epsilon_in_pixels(epsilon, bounds) -> str | None:
    """Epsilon as a fraction of 255, if it is one and pixels run from 0 to 1."""
    if not is_number(epsilon) or list(bounds or ()) != [0, 1]:
        return None
    return fraction_of_255(epsilon)


def epsilon_text(threat: dict, epsilon=None) -> str:
    """A radius, by default the threat model's, as it is usually quoted, then the plain number."""
    epsilon = threat.get("epsilon") if epsilon is None else epsilon
    fraction = None
    if threat.get("norm") == "linf":
        fraction = epsilon_in_pixels(epsilon, threat.get("bounds"))
    return f"{fraction} ({significant(epsilon)})" if fraction else significant(epsilon)


def short_epsilon(threat: dict) -> str:
    """Epsilon as it is usually quoted, alone."""
    return epsilon_text(threat).partition(" (")[0]


def pixels(threat: dict) -> str:
    """The values that pixels may have."""
    low, high = (significant(bound) for bound in threat.get("bounds") or (None, None))
    return f"pixels from {low} to {high}"


def threat_text(threat: dict) -> str:
    """The threat model in one line."""
    return f"{norm_name(threat.get('norm'))}, ε = {epsilon_text(threat)}, {pixels(threat)}"


def p_value(probability: float) -> str:
    """A p-value; a very small one as a bound."""
    return "< 0.0001" if probability < 1e-4 else f"{probability:.2g}"


def sentence(text) -> str:
    """A remark as a sentence."""
    return f"{str(text)[:1].upper()}{str(text)[1:]}."


def css_percent(share: float) -> str:
    """A share as a length in a style."""
    return f"{100.0 * share:.2f}%"


#: What templates may apply to a value, under the functions' own names.
FILTERS = (
    count,
    css_percent,
    duration,
    epsilon_text,
    interval,
    moment,
    norm_name,
    p_value,
    passes,
    percent,
    pixels,
    points,
    sentence,
    short_epsilon,
    significant,
    threat_text,
)
