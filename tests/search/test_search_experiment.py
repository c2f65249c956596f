"""A search over a configuration: what is refused before the first trial, and what it writes."""

import csv
import json
import math
import runpy

import pytest
import tiny_config

import he_keras as he
from he_keras import experiment, search
from he_keras.experiment import searching
from he_keras.experiment.catalog import digits_search_scale_margin
from he_keras.status_line import StatusLine

GRID = search.SearchSettings(
    tuner="grid",
    space=[{"scale": 5.0, "learning_rate": 0.05}, {"scale": 15.0, "learning_rate": 0.1}],
    objective="margin-pgd-2",
)


@pytest.fixture
def config():
    return tiny_config.get_config()


@pytest.fixture
def untrained(monkeypatch):
    """Trials that train nothing; the larger scale wins."""

    def run(self, values, folder, epochs):
        accuracies = {"clean_accuracy": 0.9, "robust_accuracy": values["scale"] / 100}
        return {**accuracies, "num_examples": self.num_examples, "seconds": 1.0}

    monkeypatch.setattr(searching.Search, "run_trial", run)


def test_values_go_where_they_belong(config):
    values = {"scale": 7.0, "margin": 0.0, "learning_rate": 0.3, "weight_decay": 0.0, "beta": 2.0}
    assert set(values) == set(search.NAMES)
    config.objective = {"name": "trades", "beta": 6}
    changed = experiment.with_values(config, values)
    assert (changed.head.scale, changed.head.margin) == (7.0, 0.0)
    assert (changed.optimizer.learning_rate, changed.optimizer.weight_decay) == (0.3, 0.0)
    assert changed.objective.beta == 2.0 and changed.is_locked
    assert config.head.scale == 15.0 and config.objective.beta == 6


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"head.kind": "linear"}, {}, "A linear head has no scale and no margin"),
        ({"data.validation_examples": 0}, {}, "expected data.validation_examples > 0; received 0"),
        ({"data.name": "digit"}, {}, "digit"),
        ({"train.epochs": 0}, {}, "train.epochs"),
        ({}, {"objective": "pgd-20"}, "Unknown objective of a search"),
        ({}, {"space": {"beta": "1:2"}}, "Unknown option of objective 'pgd_at'.*beta"),
        (
            {"optimizer.name": "adam"},
            {"space": {"weight_decay": "0,0.1"}},
            "Adam has neither weight decay",
        ),
        (
            {"schedule": {"name": "piecewise", "steps": (0, 1), "values": (0.1, 0.0)}},
            {"space": {"learning_rate": "0.1,0.2"}},
            "A piecewise schedule has learning rates of its own",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    config, tmp_path, changes, settings, message
):
    config.update_from_flattened_dict(
        {key: value for key, value in changes.items() if key != "schedule"}
    )
    if "schedule" in changes:
        with config.unlocked():
            config.schedule = changes["schedule"]
    settings = search.SearchSettings(**settings)
    with pytest.raises(ValueError, match=message):
        experiment.prepare_search(config, settings, tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_folder_belongs_to_one_search(config, tmp_path):
    experiment.prepare_search(config, GRID, tmp_path)
    other = search.SearchSettings(space={"scale": "1:2"})
    with pytest.raises(ValueError, match=r"another configuration.*search.tuner: 'grid' -> 'ran"):
        experiment.prepare_search(config, other, tmp_path)


def test_what_a_search_leaves(config, tmp_path, untrained):
    found = experiment.run_search(config, GRID, tmp_path)
    assert found == json.loads((tmp_path / "trials.json").read_text())
    assert found["best"] == "0001" and found["complete"] is True
    about = {"tuner": "grid", "objective": "margin-pgd-2", "seed": 0, "validation_examples": 20}
    assert about.items() <= found.items() and found["keras_tuner"].startswith("1.")
    with open(tmp_path / "trials.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["trial"], row["scale"], row["status"]) for row in table] == [
        ("0000", "5.0", "completed"),
        ("0001", "15.0", "completed"),
    ]
    assert (tmp_path / "pareto.png").exists()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["keras"] and environment["seed"] == 0
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["search"]["space"] == GRID.to_plain()["space"]


def test_the_winner_is_a_configuration_file(config, tmp_path, untrained):
    with config.unlocked():
        config.objective.num_steps = 3
        config.schedule = {"name": "step", "drop_epochs": (1, 2), "drop_factor": 0.1}
        config.train.weight_averaging.kind = "ema"
    experiment.run_search(config, GRID, tmp_path)
    path = tmp_path / "best_config.py"
    best = runpy.run_path(str(path))["get_config"]()
    expected = experiment.with_values(config, {"scale": 15.0, "learning_rate": 0.1})
    with expected.unlocked():
        expected.name = "tiny_best"
    assert best.to_dict() == expected.to_dict() and best.is_locked
    # Types too: an override on the command line is checked against them.
    assert isinstance(best.train.epochs, int) and isinstance(best.schedule.drop_epochs, tuple)
    experiment.check_config(best)
    text = path.read_text()
    assert "trial 0001, scale 15, learning_rate 0.1" in text
    assert "clean 90.00%, robust 15.00% under margin-pgd-2, on 20 validation" in text
    assert f"python tools/train.py --config={path}" in text


@pytest.mark.slow
def test_a_complete_search_is_not_run_again(config, tmp_path, untrained, monkeypatch):
    found = experiment.run_search(config, GRID, tmp_path)
    monkeypatch.setattr(search, "run_trials", None)
    again = experiment.prepare_search(config, GRID, tmp_path)
    assert again.is_complete and again.num_ended == 2
    assert again.run() == found


def test_failures_in_a_row_are_an_error(config, tmp_path, monkeypatch):
    def run(self, values, folder, epochs):
        raise FloatingPointError("loss is NaN")

    monkeypatch.setattr(searching.Search, "run_trial", run)
    settings = search.SearchSettings(space={"scale": "1:9"}, max_failures=2)
    with pytest.raises(RuntimeError, match="The last 2 trials failed; .*FloatingPointError: loss"):
        experiment.run_search(config, settings, tmp_path)
    found = search.read_tables(tmp_path)
    assert found["complete"] is False and found["best"] is None
    assert [row["status"] for row in found["trials"]] == ["failed", "failed"]


# With training


@pytest.mark.slow
def test_a_trial_is_the_training_that_the_configuration_says(config, tmp_path, monkeypatch):
    scored = []
    monkeypatch.setattr(StatusLine, "count", lambda self, *counts: scored.append(counts))
    """Also where hyperband lets it pause after one epoch, and with averaged weights."""
    with config.unlocked():
        config.train.weight_averaging.kind = "ema"
    lines = []
    prepared = experiment.prepare_search(config, GRID, tmp_path / "search", announce=lines.append)
    run = tmp_path / "search" / "tuner" / "trial_0000" / "run"
    prepared.run_trial({"scale": 5.0, "learning_rate": 0.05}, run, 1)
    assert len((run / "history.csv").read_text().splitlines()) == 2
    result = prepared.run_trial({"scale": 5.0, "learning_rate": 0.05}, run, 3)
    expected = experiment.with_values(config, {"scale": 5.0, "learning_rate": 0.05})
    model = experiment.run_training(expected, tmp_path / "plain")
    import run_comparison

    run_comparison.assert_same_run(run, tmp_path / "plain")
    images, labels = experiment.load_split(config, "validation").as_float()
    attack = search.scale_free_attack("margin-pgd-2", experiment.build_threat(config), 10, 0)
    assert result["robust_accuracy"] == pytest.approx(attack(model, images, labels).robust_accuracy)
    clean = (model.predict(images, verbose=0).argmax(-1) == labels).mean()
    assert result["clean_accuracy"] == pytest.approx(clean)
    assert result["num_examples"] == 20 and result["seconds"] > 0
    assert scored[-1] == (20, 20, "margin-pgd-2, 20 of 20 images")
    assert lines[0] == "trial_0000: scale 5, learning_rate 0.05, 1 epoch"
    assert lines.count("trial_0000: scale 5, learning_rate 0.05: resuming at epoch 2, batch 1") == 1
    assert lines[-1].startswith("trial_0000: scale 5, learning_rate 0.05: clean ")
    assert math.isclose(float(he.load_model(run / "model.keras").head.scale), 5.0)


@pytest.mark.slow
def test_a_diverged_trial_fails_alone(config, tmp_path):
    space = [{"learning_rate": 1e30}, {"learning_rate": 0.05}]
    settings = search.SearchSettings(tuner="grid", space=space, objective="margin-pgd-2")
    found = experiment.run_search(config, settings, tmp_path)
    assert [row["status"] for row in found["trials"]] == ["failed", "completed"]
    assert "NaN" in found["trials"][0]["error"] or "nan" in found["trials"][0]["error"]
    assert found["best"] == "0001"


@pytest.mark.slow
def test_a_larger_scale_hides_the_gradient_of_trained_weights(tmp_path):
    """The same weights are equally robust at every scale; the cross-entropy sees it otherwise."""
    config = digits_search_scale_margin.get_config()
    config.train.epochs, config.objective.num_steps = 4, 3
    config.objective.step_size, config.evaluation.validation_attack = "0.08", ""
    model = experiment.run_training(config, tmp_path)
    images, labels = experiment.load_split(config, "validation").as_float()
    threat = experiment.build_threat(config)
    naive = he.attacks.get("pgd-10", threat, loss="ce")
    ours = search.scale_free_attack("margin-pgd-10", threat, 10, 0)
    accuracies = {}
    for scale in (10.0, 10000.0):
        model.head.scale = scale
        loaded = he.HEAdversarialModel(model.network, model.head, model.objective)
        accuracies[scale] = [each(loaded, images, labels).robust_accuracy for each in (naive, ours)]
    (naive_small, ours_small), (naive_large, ours_large) = accuracies.values()
    assert naive_large > naive_small + 0.15
    assert ours_large == pytest.approx(ours_small, abs=0.02)
