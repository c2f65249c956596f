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
from learning_rates import rate_at
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
    monkeypatch.setattr(Search, "is_complete", True)
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
    optimizer = experiment.build_optimizer(config, steps)
    assert rate_at(optimizer, last) == pytest.approx(0.0, abs=1e-9)
    assert rate_at(optimizer, last - 1) > 0.0
    assert rate_at(optimizer, last // 2) == pytest.approx(config.optimizer.learning_rate)
    objective = experiment.build_objective(config, steps)
    radii = [float(objective.sizes_at(step).threat.epsilon) for step in (last // 2, last - 1)]
    np.testing.assert_allclose(radii, [0.05, 0.1 * (1 - 1 / last)], rtol=1e-4)


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("schedule", {"name": "linear", "slope": -0.06}, "learning rate .* 0 or more.*received -"),
        ("schedule", {"name": "piecewise", "epochs": (0, 3), "values": (0.1, -0.1)}, "received -"),
        ("epsilon_schedule", {"name": "constant", "initial": "0.2"}, "0 to 0.1 .*received 0.2"),
        ("epsilon_schedule", {"name": "triangular", "peak": "0.11"}, "received 0.1"),
        ("epsilon_schedule", {"name": "step", "initial": 0.2, "drop_epochs": (1,)}, "0 to 0.1"),
        ("epsilon_schedule", {"name": "linear", "initial": 0.1, "slope": -0.1}, "received -0.1"),
    ],
)
def test_a_schedule_that_leaves_its_range_is_refused_before_any_work(section, options, message):
    """A negative learning rate would ascend the loss, without a word."""
    config = tiny_config.get_config()
    with config.unlocked():
        config[section] = options
    with pytest.raises(ValueError, match=message):
        experiment.build_optimizer(config, 10)
        experiment.build_objective(config, 10)


@pytest.mark.parametrize("name", ["constant", "cosine", "step", "triangular", "warm_up"])
def test_sizes_of_a_schedule_may_be_fractions(name):
    height = {"triangular": "peak", "warm_up": "target"}.get(name, "initial")
    others = {"step": {"drop_epochs": (1,)}, "warm_up": {"num_epochs": 2}}.get(name, {})
    config = tiny_config.get_config()
    with config.unlocked():
        config.epsilon_schedule = {"name": name, height: "8/255", **others}
    radius = experiment.build_objective(config, 10).epsilon_schedule
    assert max(float(radius(step)) for step in range(30)) == pytest.approx(8 / 255)


def test_the_learning_rate_may_warm_up():
    config = tiny_config.get_config()
    with config.unlocked():
        config.schedule = {"name": "warm_up", "num_epochs": 2}
    optimizer = experiment.build_optimizer(config, 10)
    highest = config.optimizer.learning_rate
    assert [rate_at(optimizer, step) for step in (0, 10)] == pytest.approx([highest / 2, highest])


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


def test_a_run_of_an_older_version_goes_on(tmp_path):
    """A key that it could not know has its default, and no other value."""
    config = linear_config()
    plain = experiment.to_plain(config)
    del plain["train"]["weight_averaging"]["batch_norm_batches"]
    del plain["data"]["test_fraction"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    for changed in (True, False):
        with config.unlocked():
            config.data.test_fraction = 0.25 if changed else 0.0
        if changed:
            with pytest.raises(ValueError, match=r"with data.test_fraction: 0.0 -> 0.25$"):
                experiment.prepare_training(config, tmp_path)
        else:
            experiment.prepare_training(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == experiment.to_plain(config)


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
def set_aside():
    """What the quickstart does before it trains."""
    before = set(flags.FLAGS)
    sys.modules.pop("he_keras.programs.quickstart", None)
    yield importlib.import_module("he_keras.programs.quickstart")._set_aside
    # Every program has an --output_dir of its own.
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


def write(folder, name, *files):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": name}))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("content")


def found(folder):
    """Names and contents of all files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_the_quickstart_deletes_and_overwrites_nothing(set_aside, tmp_path):
    """Not even what somebody else put into its folders."""
    for head in ("linear", "he"):
        write(tmp_path / head, f"quickstart_{head}", "model.keras", "evaluation/notes.txt")
    for name in ("table.txt", "report.html", "mine.txt", "serving/digits/1/saved_model.pb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    (tmp_path / "earlier-1").mkdir()
    before = found(tmp_path)
    set_aside(tmp_path)
    stay = {name for name in before if name.startswith(("mine", "serving"))}
    moved = {name if name in stay else f"earlier-2/{name}": before[name] for name in before}
    assert found(tmp_path) == moved
    set_aside(tmp_path)
    assert found(tmp_path) == moved and not (tmp_path / "earlier-3").exists()


@pytest.mark.parametrize("name", ["cifar10_small", "quickstart_linear", None])
def test_the_quickstart_refuses_what_is_not_its_own(set_aside, tmp_path, name):
    """Before it trains the other head, and before it moves anything."""
    write(tmp_path / "linear", "quickstart_linear", "model.keras")
    if name is None:
        (tmp_path / "he").mkdir()
        (tmp_path / "he" / "model.keras").write_text("content")
    else:
        write(tmp_path / "he", name, "model.keras")
    before = found(tmp_path)
    with pytest.raises(ValueError, match=f"something else.*received {tmp_path}/he: move it"):
        set_aside(tmp_path)
    assert found(tmp_path) == before


def test_the_quickstart_refuses_a_folder_with_files_of_its_names(set_aside, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ValueError, match=f"received {tmp_path}/report.html"):
        set_aside(tmp_path)


def test_the_quickstart_moves_no_run_that_is_trained(set_aside, tmp_path):
    write(tmp_path / "he", "quickstart_he", "model.keras")
    with run_folder.held(tmp_path / "he", "trains"):
        with pytest.raises(ValueError, match="Another process trains into this folder"):
            set_aside(tmp_path)
    assert (tmp_path / "he" / "model.keras").exists()
