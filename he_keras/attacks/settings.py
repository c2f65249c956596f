"""Checks of settings that several attacks share, beyond those of every attack."""

from he_keras.threat import parse_epsilon


def positive_number(name: str, value) -> float:
    """Returns a number or a fraction such as "2/255" as a float; it must be above 0."""
    number = parse_epsilon(value)
    if isinstance(value, bool) or number <= 0:
        raise ValueError(f"Invalid {name}; expected a number > 0; received {name}={value!r}")
    return number


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"Unknown {name}; expected one of {choices}; received {name}={value!r}")
