"""Public robust checkpoints as Keras models: `load`, and what there is: `recipes`, `entries`."""

from he_keras.zoo.catalog import entries, recipes, register
from he_keras.zoo.clean_check import CleanCheck, check_clean
from he_keras.zoo.downloads import download
from he_keras.zoo.loading import inspect, load
from he_keras.zoo.recipe import Entry, Recipe

__all__ = [
    "CleanCheck",
    "Entry",
    "Recipe",
    "check_clean",
    "download",
    "entries",
    "inspect",
    "load",
    "recipes",
    "register",
]
