"""Which packages he_keras asks for, and which are installed.

This file imports nothing of the package, so that the command can read it where TensorFlow cannot be
imported.
"""

import importlib.metadata
import platform
from typing import NamedTuple

_NAME = "he_keras"
_HINT = "pip install -U"


class Package(NamedTuple):
    """A package that he_keras asks for.

    Attributes:
        name: its name.
        wanted: the versions that fit.
        version: the one that is installed; None without any.
        extra: the extra that asks for it; empty for what everybody needs.
        fits: whether the installed version fits.
    """

    name: str
    wanted: str
    version: str | None
    extra: str
    fits: bool

    def problem(self) -> str:
        """Returns what to do about it in one line; empty if nothing."""
        if self.fits or (self.extra and self.version is None):
            return ""
        what = f"received {self.version}" if self.version else "received none"
        hint = f"{_HINT} '{self.name}{self.wanted}'"
        return f"{self.name} does not fit; expected {self.wanted or 'any'}; {what}: {hint}"


def packages() -> list[Package]:
    """Returns every package that the installed he_keras asks for; nothing if it is not installed.

    Example:
        >>> from he_keras.requirements import packages
        >>> [package.name for package in packages() if package.problem()]
        []
    """
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = {}
    for requirement in map(Requirement, lines):
        extra = _extra(requirement)
        if extra is None or requirement.name in found:
            continue
        version = _version(requirement.name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        wanted = ",".join(sorted(map(str, requirement.specifier), reverse=True))
        found[requirement.name] = Package(requirement.name, wanted, version, extra, fits)
    return list(found.values())


def table(found: list[Package]) -> str:
    """Returns the packages as lines of text; those of extras only where they are installed."""
    shown = [package for package in found if package.version or not package.extra]
    lines = []
    for package in shown:
        extra = f"  [{package.extra}]" if package.extra else ""
        verdict = "ok" if package.fits else "DOES NOT FIT"
        version = package.version or "missing"
        lines.append(f"  {package.name:<22}{version:<12}{verdict}, {package.wanted}{extra}")
    return "\n".join(lines)


def problems(found: list[Package]) -> list[str]:
    """Returns what does not fit, one line each."""
    lines = [package.problem() for package in found]
    wanted = _python_wanted()
    if wanted is not None and not wanted.contains(platform.python_version(), prereleases=True):
        version = platform.python_version()
        lines.append(f"Python does not fit; expected {wanted}; received {version}")
    return [line for line in lines if line]


def installed_version() -> str | None:
    """Returns the version that pip knows; None if he_keras is not installed."""
    return _version(_NAME)


def _extra(requirement) -> str | None:
    """The extra that asks for it, "" for none; None if this machine does not need it."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    for extra in ("gpu", "onnx", "serve"):
        if requirement.marker.evaluate({"extra": extra}):
            return extra
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_wanted():
    from packaging.specifiers import SpecifierSet

    try:
        text = importlib.metadata.metadata(_NAME).get("Requires-Python")
    except importlib.metadata.PackageNotFoundError:
        return None
    return SpecifierSet(text) if text else None
