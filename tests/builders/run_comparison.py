"""Compares two run folders to the last bit, for the tests of resuming."""

import csv
import json
import zipfile

import h5py
import numpy as np


def weights_in(path):
    """Every array in a `.keras` file (weights, optimizer, objective), by its place."""
    arrays = {}
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        h5py.File(file).visititems(
            lambda name, item: (
                arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return arrays


def state_in(path):
    """The checkpoint's arrays, without the time that things took."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name in list(arrays):
        if name.endswith("/seconds"):
            del arrays[name]
        elif name.endswith("/rows"):
            rows = json.loads(str(arrays[name]))
            arrays[name] = np.array(str([{**row, "seconds": None} for row in rows]))
    return arrays


def history_in(path):
    with open(path, newline="") as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


def assert_same_bits(one, other, what):
    assert sorted(one) == sorted(other), what
    assert one, what
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), f"{what}: {name}"


def assert_same_run(folder, reference, what=""):
    for file in ("model.keras", "checkpoints/best.keras"):
        if (reference / file).exists() or (folder / file).exists():
            assert_same_bits(weights_in(folder / file), weights_in(reference / file), (what, file))
    latest = "checkpoints/latest.npz"
    assert_same_bits(state_in(folder / latest), state_in(reference / latest), what)
    assert history_in(folder / "history.csv") == history_in(reference / "history.csv"), what
    partial = [each for each in folder.rglob("*") if "partial" in each.name]
    assert partial == [], what
