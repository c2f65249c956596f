"""All recipes and entries by name. To add one, write a file in `recipes` and name it here."""

from he_keras.arguments import suggestion
from he_keras.registry import Registry
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
RECIPES: Registry[Recipe] = Registry("recipe")
ENTRIES: Registry[Entry] = Registry("entry")


def register(recipe: Recipe, *published: Entry) -> Recipe:
    """Makes a recipe known to `load`, with the files that are published in its layout.

    Args:
        recipe: the recipe.
        *published: entries, each named after the recipe: "my_recipe/wrn-28-10".

    Example:
        >>> import he_keras as he
        >>> mine = he.zoo.Recipe("mine", "us", "wide-resnet", {"conv1": "stem_conv"}, ("fc",))
        >>> # he.zoo.register(mine)
    """
    strange = [entry.name for entry in published if not entry.name.startswith(f"{recipe.name}/")]
    if strange:
        raise ValueError(
            f"An entry has a strange name; expected {recipe.name}/ at the beginning; received "
            f"{strange[0]!r}"
        )
    RECIPES[recipe.name] = recipe
    for entry in published:
        ENTRIES[entry.name] = entry
    return recipe


for _file in _FILES:
    register(_file.RECIPE, *_file.ENTRIES)


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
    """Returns the recipe of this name and None, or the recipe of an entry and the entry.

    Args:
        name: of a recipe or of an entry.
    """
    if name in RECIPES:
        return RECIPES[name], None
    if name in ENTRIES:
        return RECIPES[next(each for each in RECIPES if name.startswith(f"{each}/"))], ENTRIES[name]
    raise ValueError(
        f"Unknown checkpoint; expected one of {', '.join(RECIPES)}, or the name of one of "
        f"he_keras.zoo.entries(); received {name!r}{suggestion(name, [*RECIPES, *ENTRIES])}"
    )
