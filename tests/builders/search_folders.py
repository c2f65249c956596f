"""Searches without training, for tests: a trial's metrics are a function of its values."""

import json
import os

import keras
import pytest

from he_keras import search


def tiny_model(values=None):
    del values
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def score(values):
    """Best near scale 12 and margin 0.2, with clean accuracy falling as the margin grows."""
    robust = 0.6 - 0.002 * abs(values.get("scale", 12.0) - 12.0)
    robust -= abs(values.get("margin", 0.2) - 0.2) / 2
    clean = 0.9 - values.get("margin", 0.2) / 4
    return {"clean_accuracy": clean, "robust_accuracy": robust, "seconds": 0.0}


class Trials:
    """A trial function that counts its calls, and strikes where it is told to."""

    def __init__(self, strike=lambda number, values: None):
        self.calls = []
        self.strike = strike

    def __call__(self, values, folder, epochs):
        self.calls.append((dict(values), folder.parent.name, epochs))
        self.strike(len(self.calls), values)
        return score(values)


def make(settings, folder, trials=None, max_epochs=9, seed=0):
    space = settings.parsed_space()
    model = search.make_hypermodel(space, tiny_model, trials or Trials())
    return search.make_tuner(settings, model, folder, seed, max_epochs)


def rows(tuner, folder):
    return search.collect(tuner.oracle, folder / search.PROJECT)


def run(settings, folder, trials=None, **options):
    tuner = make(settings, folder, trials, **options)
    search.run_trials(tuner)
    return rows(tuner, folder)


def state(folder):
    return json.loads((folder / search.PROJECT / "oracle.json").read_text())


def become(monkeypatch, tuner_id, port=1):
    """Makes this process the chief or a worker, as keras-tuner's variables do."""
    monkeypatch.setitem(os.environ, "KERASTUNER_TUNER_ID", tuner_id)
    monkeypatch.setitem(os.environ, "KERASTUNER_ORACLE_IP", "127.0.0.1")
    monkeypatch.setitem(os.environ, "KERASTUNER_ORACLE_PORT", str(port))


class Kill(BaseException):
    """Stands for the end of the process: nothing in its way catches it."""


def run_until_killed(settings, folder, at):
    def strike(number, values):
        if number == at:
            raise Kill

    with pytest.raises(Kill):
        run(settings, folder, Trials(strike))
