"""Short names for models that are given by their paths."""

import pathlib
from collections.abc import Sequence


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1)):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
