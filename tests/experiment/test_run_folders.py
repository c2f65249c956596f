"""Run folders: one training at a time, their own files, and the schedules they were asked for."""

import importlib
import json
import pathlib
import sys
import types

import numpy as np
import pytest
import tiny_config
from absl import flags
from ml_collections import ConfigDict
from programs import run_here

from he_keras import experiment, objectives, search
from he_keras.experiment import run_folder
from he_keras.experiment.searching import Search

SETTINGS = search.SearchSettings(tuner="grid", space={"scale": "5,15"}, objective="margin-pgd-2")


def linear_config():
    """Synthetic data and a network of one convolution."""
    config = experiment.smoke_variant(tiny_config.get_config())
    with config.unlocked():
        config.head.kind = "he"
        config.evaluation.validation_attack = "fgsm"
    return config.lock()


# One process at a time


def test_a_folder_is_held_by_one_process(tmp_path):
    with run_folder.held(tmp_path, "trains"):
        with pytest.raises(ValueError, match=f"Another process trains into.*received {tmp_path}$"):
            run_folder.held(tmp_path, "trains").__enter__()
    with run_folder.held(tmp_path, "trains"):
        pass


def test_two_trainings_share_no_folder(tmp_path):
    """Neither from the start nor from between its preparation and its beginning."""
    training = experiment.prepare_training(linear_config(), tmp_path)
    with run_folder.held(tmp_path, "trains"):
        for refused in (training.run, lambda: experiment.run_training(linear_config(), tmp_path)):
            with pytest.raises(ValueError, match="Another process trains into this folder"):
                refused()
    training.resume.path.parent.mkdir()
    training.resume.path.touch()
    with pytest.raises(ValueError, match="changed since .* prepared; expected another prepare"):
        training.run()
    assert not (tmp_path / "model.keras").exists()


@pytest.mark.slow
def test_a_training_leaves_its_folder_when_it_ends(tmp_path):
    training = experiment.prepare_training(linear_config(), tmp_path)
    training.run()
    assert experiment.prepare_training(linear_config(), tmp_path).is_complete
    with pytest.raises(ValueError, match="expected another prepare_training"):
        training.run()


def test_two_searches_share_no_folder_and_workers_may(tmp_path, monkeypatch):
    prepared = Search(linear_config(), SETTINGS, tmp_path)
    monkeypatch.setattr(prepared, "_run", dict)
    with run_folder.held(tmp_path, "searches"):
        for refused in (prepared.run, lambda: Search(linear_config(), SETTINGS, tmp_path)):
            with pytest.raises(ValueError, match="Another process searches into this folder"):
                refused()
        monkeypatch.setattr("he_keras.search.role", lambda: "worker")
        assert Search(linear_config(), SETTINGS, tmp_path).role == "worker"
    assert prepared.run() == {}


# The length of a schedule


@pytest.mark.parametrize(
    ("objective", "updates"),
    [
        ({"name": "pgd_at", "num_steps": 2}, 1),
        ({"name": "free_at"}, 4),
        ({"name": "free_at", "num_replays": 8}, 8),
        ({"name": "awp", "base": {"name": "trades"}}, 1),
    ],
)
def test_schedules_end_with_the_training(objective, updates):
    """By what the objective does, not by what its configuration says."""
    config = tiny_config.get_config()
    with config.unlocked():
        config.objective = objective
        config.epsilon_schedule = {
            "name": "cycle_linear",
            "initial": 0.0,
            "final": 0.1,
            "unit": "batch",
        }
    steps = 10
    last = steps * config.train.epochs * updates
    rate = experiment.build_optimizer(config, steps)._learning_rate
    assert float(rate(last)) == pytest.approx(0.0, abs=1e-9)
    assert float(rate(last - 1)) > 0.0
    assert float(rate(last // 2)) == pytest.approx(config.optimizer.learning_rate)
    objective = experiment.build_objective(config, steps)
    radii = [float(objective.sizes_at(step).threat.epsilon) for step in (last // 2, last - 1)]
    np.testing.assert_allclose(radii, [0.05, 0.1 * (1 - 1 / last)], rtol=1e-4)


def test_every_objective_says_how_often_it_updates():
    for name in objectives.names():
        built = objectives.get(name, experiment.build_threat(tiny_config.get_config()))
        assert built.updates_per_batch == getattr(built, "num_replays", 1)


# What an older version wrote


def test_missing_keys_are_completed_at_any_depth(tmp_path):
    config = tiny_config.get_config()
    plain = experiment.to_plain(config)
    del plain["train"]["weight_averaging"]["batch_norm_batches"]
    del plain["train"]["cycle_ends"]
    del plain["evaluation"]["mode"]
    del plain["epsilon_schedule"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    read = experiment.read_config(tmp_path)
    assert experiment.to_plain(read) == experiment.to_plain(config)
    for one, other in ((read.train, config.train), (read.evaluation, config.evaluation)):
        assert one.to_dict() == other.to_dict()
    experiment.check_config(read)


def test_keys_that_belong_to_an_objective_are_not_completed(tmp_path):
    config = tiny_config.get_config()
    with config.unlocked():
        config.objective = ConfigDict({"name": "free_at"})
    plain = experiment.to_plain(config)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert experiment.read_config(tmp_path).objective.to_dict() == {"name": "free_at"}


# A full disk


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_full_disk_says_which_checkpoint_there_is(tmp_path, monkeypatch, capfd, has_checkpoint):
    checkpoint = tmp_path / "checkpoints" / "latest.npz"
    if has_checkpoint:
        checkpoint.parent.mkdir()
        checkpoint.touch()

    def run():
        raise OSError(28, "No space left on device")

    training = types.SimpleNamespace(
        folder=tmp_path,
        place=(0, 0),
        is_complete=False,
        steps=4,
        run=run,
        resume=types.SimpleNamespace(path=checkpoint),
    )
    monkeypatch.setattr(experiment, "prepare_training", lambda *_: training)
    config = pathlib.Path(tiny_config.__file__)
    code, _, err = run_here(monkeypatch, capfd, "train", f"--config={config}")
    assert code == 1 and "No space left on device" in err
    said = f"the last checkpoint is {checkpoint}. To resume" if has_checkpoint else "no checkpoint"
    assert said in err
    assert ("no checkpoint" in err) == (not has_checkpoint)


# The quickstart


@pytest.fixture
def quickstart():
    before = set(flags.FLAGS)
    sys.modules.pop("he_keras.programs.quickstart", None)
    yield importlib.import_module("he_keras.programs.quickstart")
    # Every program has an --output_dir of its own.
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


def write(folder, name, *files):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": name}))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("content")


def test_the_quickstart_removes_only_what_it_made(quickstart, tmp_path):
    made = ["model.keras", "checkpoints/latest.npz", "evaluation/report.html", "history.csv"]
    write(tmp_path / "he", "quickstart_he", *made, "notes.txt", "mine/model.keras")
    quickstart._remove_earlier(tmp_path / "he", "quickstart_he")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["he/mine/model.keras", "he/notes.txt"]


@pytest.mark.parametrize("name", ["cifar10_small", "quickstart_linear"])
def test_the_quickstart_leaves_another_run_alone(quickstart, tmp_path, name):
    write(tmp_path / "he", name, "model.keras")
    quickstart._remove_earlier(tmp_path / "he", "quickstart_he")
    assert (tmp_path / "he" / "model.keras").exists()


@pytest.mark.slow
def test_the_quickstart_names_all_that_a_run_writes(quickstart, tmp_path):
    config = linear_config()
    experiment.run_training(config, tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written - {".lock"} == set(quickstart._MADE) - {"evaluation"}
