"""The experiments of the catalog by the names of their configurations."""

from he_keras.experiment import catalog

ENTRIES = {entry.name: entry for entry in catalog.entries()}
NAMES = sorted(ENTRIES)
load = catalog.get_config


def header(name):
    return ENTRIES[name].header()
