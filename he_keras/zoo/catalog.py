"""All recipes and entries by name. To add one, write a file in `recipes` and name it here."""

from he_keras.arguments import suggestion
from he_keras.zoo.recipe import Entry, Recipe
from he_keras.zoo.recipes import (
    at_he,
    deepmind_jax,
    deepmind_preact,
    deepmind_wrn,
    fast_adversarial,
    madry,
    robustbench_boosting,
    robustbench_preact,
    robustbench_resnet,
    robustbench_wrn,
    trades,
)

_FILES = (
    at_he,
    trades,
    robustbench_wrn,
    robustbench_boosting,
    robustbench_preact,
    robustbench_resnet,
    deepmind_wrn,
    deepmind_preact,
    deepmind_jax,
    fast_adversarial,
    madry,
)
RECIPES: dict[str, Recipe] = {file.RECIPE.name: file.RECIPE for file in _FILES}
ENTRIES: dict[str, Entry] = {entry.name: entry for file in _FILES for entry in file.ENTRIES}


def recipes() -> list[str]:
    """Returns the names of the layouts that `load` knows.

    Example:
        >>> import he_keras as he
        >>> "at_he" in he.zoo.recipes()
        True
    """
    return list(RECIPES)


def entries() -> list[Entry]:
    """Returns the published files that `load` knows.

    Example:
        >>> import he_keras as he
        >>> [entry.robust for entry in he.zoo.entries() if entry.name == "at_he/wrn-34-20"]
        [53.74]
    """
    return list(ENTRIES.values())


def find(name: str) -> tuple[Recipe, Entry | None]:
    """Returns the recipe of this name and None, or the recipe of an entry and the entry."""
    if name in RECIPES:
        return RECIPES[name], None
    if name in ENTRIES:
        return RECIPES[next(each for each in RECIPES if name.startswith(f"{each}/"))], ENTRIES[name]
    raise ValueError(
        f"Unknown checkpoint; expected one of {', '.join(RECIPES)}, or the name of one of "
        f"he_keras.zoo.entries(); received {name!r}{suggestion(name, [*RECIPES, *ENTRIES])}"
    )
