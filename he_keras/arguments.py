"""Checks of arguments, made before any work: each error says what was expected and what came."""

import difflib
import inspect
import math
import numbers
import re
import textwrap
from collections.abc import Iterable

#: Seeds fit into TensorFlow's 32-bit signed integers.
_LARGEST_SEED = 2**31 - 1
#: What switches bold type and colours on and off in a terminal.
BOLD_TYPE = re.compile("\x1b\\[[0-9;]*m")
#: Where an error happened, as Python writes it.
PLACE = re.compile(r'File "(.+?)", line (\d+)')
#: More names than the attacks have, which have the longest list that people read.
_MOST_LISTED = 40
#: Difference of likeness, 0..1, up to which two names may both be meant.
_AS_NEAR = 0.1
#: Characters of another library's message that an error repeats: about three lines.
_LONGEST_REASON = 300


def parse_epsilon(value: float | int | str) -> float:
    """Reads a perturbation size given as a number or as a fraction such as "8/255".

    Example:
        >>> from he_keras.arguments import parse_epsilon
        >>> parse_epsilon("51/255")
        0.2
    """
    try:
        if isinstance(value, str):
            numerator, slash, denominator = value.partition("/")
            number = float(numerator) / float(denominator) if slash else float(numerator)
        else:
            number = float(value)
    except (TypeError, ValueError, ArithmeticError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            'Invalid perturbation size; expected a finite number or a fraction such as "8/255"; '
            f"received value={value!r}"
        )
    return number


def is_integer(value) -> bool:
    """Whether `value` is an integer of Python or NumPy. True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value) -> bool:
    """Whether `value` is a finite number of Python or NumPy. True and False are not."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def check_integer(name: str, value, minimum: int, maximum: float = math.inf) -> None:
    """Raises a ValueError unless `value` is an integer from `minimum` to `maximum`."""
    if not is_integer(value) or not minimum <= value <= maximum:
        limits = f">= {minimum}" if maximum == math.inf else f"in {minimum}..{maximum}"
        raise ValueError(f"Invalid {name}; expected an integer {limits}; received {name}={value!r}")


def check_positive_integer(name: str, value) -> None:
    """Raises a ValueError unless `value` is an integer of at least 1."""
    check_integer(name, value, 1)


def check_seed(seed) -> None:
    """Raises a ValueError unless `seed` is an integer from 0 to 2**31 - 1."""
    if not is_integer(seed) or not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"Invalid seed; expected an integer in 0..2**31-1; received seed={seed!r}")


def check_number(name: str, value, minimum: float = -math.inf) -> None:
    """Raises a ValueError unless `value` is a finite number of at least `minimum`."""
    if not is_number(value) or value < minimum:
        limit = "" if minimum == -math.inf else f" >= {minimum}"
        raise ValueError(
            f"Invalid {name}; expected a finite number{limit}; received {name}={value!r}"
        )


def check_positive(name: str, value) -> None:
    """Raises a ValueError unless `value` is a finite number above 0."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"Invalid {name}; expected a finite number > 0; received {name}={value!r}")


def positive_number(name: str, value) -> float:
    """Returns a number or a fraction such as "2/255" as a float; it must be above 0."""
    number = parse_epsilon(value)
    if isinstance(value, bool) or number <= 0:
        raise ValueError(f"Invalid {name}; expected a number > 0; received {name}={value!r}")
    return number


def check_share(name: str, value, below_one: bool = False) -> None:
    """Raises a ValueError unless `value` is a number from 0 to 1, with `below_one` less than 1."""
    if not is_number(value) or not 0 <= value <= 1 or (below_one and value == 1):
        interval = "[0, 1)" if below_one else "[0, 1]"
        raise ValueError(
            f"Invalid {name}; expected a number in {interval}; received {name}={value!r}"
        )


def check_flag(name: str, value) -> None:
    """Raises a TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"Invalid {name}; expected True or False; received {name}={value!r}")


def check_choice(name: str, value, choices: Iterable[str]) -> None:
    """Raises a ValueError unless `value` is one of `choices`; it suggests the nearest one."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"Unknown {name}; expected one of {choices}; received {name}={value!r}"
            f"{suggestion(value, choices)}"
        )


def unknown_name(kind: str, name, known: Iterable[str]) -> ValueError:
    """Returns the error for a name that nothing has. It lists the known names, if they are few.

    Example:
        >>> from he_keras.arguments import unknown_name
        >>> print(unknown_name("fruit", "aple", ["apple", "plum"]))
        Unknown fruit; expected one of apple, plum; received 'aple'; did you mean 'apple'?
    """
    known = list(known)
    shown = ", ".join(known)
    if len(known) > _MOST_LISTED:
        nearest = difflib.get_close_matches(str(name), known, n=3, cutoff=0.0)
        shown = f"{len(known)} names, such as {', '.join(nearest)}"
    return ValueError(
        f"Unknown {kind}; expected one of {shown}; received {name!r}{suggestion(name, known)}"
    )


def check_options(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises a ValueError for the first option that is not known; it suggests the nearest one.

    Example:
        >>> from he_keras.arguments import check_options
        >>> check_options("pgd", ["stepsize"], ["num_steps", "step_size"])
        Traceback (most recent call last):
        ValueError: Unknown option of pgd; expected one of num_steps, step_size; received ...
    """
    known = tuple(known)
    for each in given:
        if each not in known:
            raise ValueError(
                f"Unknown option of {what}; expected one of {', '.join(known) or '(it has none)'}; "
                f"received {each}{suggestion(each, known)}"
            )


def check_takes(function, name: str, /, *arguments: str, **options) -> None:
    """Raises a TypeError unless a function of somebody else's takes arguments in this order."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        given = ", ".join([*arguments, *(f"{option}=..." for option in options)])
        raise TypeError(
            f"{name} takes other arguments; expected {name}({given}); "
            f"received {name}{inspect.signature(function)}"
        ) from None


def suggestion(name, known: Iterable[str]) -> str:
    """Returns the end of an error that suggests the known name near to `name`, if there is one.

    Two names are suggested where the second is nearly as near.

    Example:
        >>> from he_keras.arguments import suggestion
        >>> suggestion("modle", ["mode", "model", "run"])
        "; did you mean 'mode' or 'model'?"
    """
    by_lower_case = {each.lower(): each for each in known if isinstance(each, str)}
    given = str(name).lower()
    nearest = difflib.get_close_matches(given, by_lower_case, n=2)
    near = [difflib.SequenceMatcher(None, each, given).ratio() for each in nearest]
    meant = [
        repr(by_lower_case[each])
        for each, likeness in zip(nearest, near, strict=True)
        if likeness > near[0] - _AS_NEAR
    ]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def reason_of(error: BaseException) -> str:
    """Returns another library's error in one line of at most 300 characters.

    Keras writes its errors over many lines and in bold type, which is left out. TensorFlow repeats
    the code that it traces; what remains is the error in it and its place.
    """
    # The text of a KeyError is in quotation marks.
    is_key = isinstance(error, KeyError) and "\n" in str(error.args[0])
    text = BOLD_TYPE.sub("", error.args[0] if is_key else str(error)) or type(error).__name__
    if is_traced(error):
        inner = text[text.rindex("\n\n    ") :].strip()
        places = PLACE.findall(text)
        own = [place for place in places if "/he_keras/" not in place[0]] or places
        place = "" if "; expected" in inner else f" ({own[-1][0]}, line {own[-1][1]})"
        return textwrap.shorten(inner, _LONGEST_REASON - len(place)) + place
    return textwrap.shorten(text, _LONGEST_REASON)


def is_traced(error: BaseException) -> bool:
    """Whether TensorFlow has put its record of traced code around an error."""
    return str(error).startswith("in user code:") and "\n\n    " in str(error).rstrip()


def is_increasing(values) -> bool:
    """Whether each number is larger than the one before."""
    values = list(values)
    return all(low < high for low, high in zip(values, values[1:], strict=False))
