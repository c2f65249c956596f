"""What several tests of programs start from."""

import functools

import pytest
import tiny_config
from programs import run_here

import he_keras as he


@pytest.fixture
def run(monkeypatch, capfd):
    return functools.partial(run_here, monkeypatch, capfd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run folder of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config.get_config()
    config.train.epochs = 1
    he.experiment.run_training(config, folder)
    return folder
