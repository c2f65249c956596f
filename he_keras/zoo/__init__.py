"""Public robust checkpoints as Keras models: `load`, and what there is: `recipes`, `entries`."""

from he_keras.zoo.catalog import entries, recipes
from he_keras.zoo.loading import load
from he_keras.zoo.recipe import Entry, Recipe

__all__ = ["Entry", "Recipe", "entries", "load", "recipes"]
