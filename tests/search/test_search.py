"""The space, the settings and the objective of a search; what the tuners make of them."""

import csv
import importlib
import json

import numpy as np
import pytest
import search_folders
from search_folders import Trials

import he_keras as he
from he_keras import drawing, search
from he_keras.search import pareto
from he_keras.search.pareto import draw_pareto, on_front
from he_keras.search.space import Range

THREAT = he.ThreatModel("linf", 0.1)
SPACE = {"scale": "5:30:log", "margin": "0,0.1,0.2,0.3"}


# The space


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("5:30", Range(5.0, 30.0, "linear")),
        ("5:30:log", Range(5.0, 30.0, "log")),
        ("1,5,10", (1.0, 5.0, 10.0)),
        ([1, 5], (1.0, 5.0)),
        (15, (15.0,)),
        ("15", (15.0,)),
    ],
)
def test_forms_of_a_setting(setting, expected):
    assert search.Space({"scale": setting}).entries == {"scale": expected}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Nothing to search; expected some of"),
        (
            {"scael": "1:2"},
            "Unknown hyperparameter; .*margin.*; received 'scael'; did you mean 'scale'",
        ),
        ([{"scael": 1}], "Unknown hyperparameter"),
        ({"scale": "30:5"}, "Empty range of scale; expected low < high; received scale=30:5"),
        ({"scale": "5:5"}, "Empty range"),
        ({"scale": "0:5"}, "Invalid scale; expected a finite number > 0; received scale=0"),
        ({"scale": "-1,5"}, "Invalid scale; expected a finite number > 0"),
        ({"scale": "nan"}, "Invalid scale"),
        ({"scale": [True]}, "Invalid scale"),
        ({"scale": "inf:7"}, "Invalid scale"),
        ({"learning_rate": "0:1"}, "Invalid learning_rate; expected a finite number > 0"),
        ({"margin": "-0.1:0.2"}, "Invalid margin; expected a finite number >= 0"),
        ({"margin": "0:0.2:log"}, "A logarithmic range begins above 0"),
        ({"scale": "1:2:cubic"}, "Invalid range of scale; expected low:high or low:high:log"),
        ({"scale": "1:2:log:9"}, "Invalid range of scale"),
        ({"scale": "5,5"}, "Invalid values of scale; expected at least one, none twice"),
        ({"scale": []}, "Invalid values of scale"),
        ({"scale": ""}, "Invalid scale"),
        ([{"scale": 1}, {"margin": 0}], "Invalid points; expected .* the same names in each"),
        ([], "Invalid points; expected at least one"),
        ([{"scale": 1}, {"scale": 1.0}], "Points must differ"),
    ],
)
def test_wrong_spaces(settings, message):
    with pytest.raises(ValueError, match=message):
        search.Space(settings)


@pytest.mark.parametrize("settings", ["scale=1:2", {"scale": {"low": 1}}, [1, 2]])
def test_spaces_of_another_kind(settings):
    with pytest.raises(TypeError, match="Invalid space"):
        search.Space(settings)


def test_a_space_is_what_its_plain_form_says():
    for settings in ({"scale": "5:30:log", "margin": "0,0.5"}, [{"scale": 1.0}, {"scale": 2.0}]):
        space = search.Space(settings)
        again = search.Space(json.loads(json.dumps(space.to_plain())))
        assert (again.entries, again.points) == (space.entries, space.points)


def test_corners_hold_every_limit_and_value():
    corners = search.Space({"scale": "5:30", "margin": "0,0.1,0.2", "beta": 6}).corners()
    found = {name: {corner[name] for corner in corners} for name in corners[0]}
    assert found == {"scale": {5.0, 30.0}, "margin": {0.0, 0.1, 0.2}, "beta": {6.0}}


def test_values_have_the_digits_that_are_shown():
    space = search.Space({"margin": "0:1"})
    assert space.values({"margin": 0.123456789}) == {"margin": 0.123457}


def test_table_9_is_the_papers():
    """Appendix of the HE paper: margins 0 to 0.5 at s = 15, scales 1 to 20 at m = 0.2."""
    preset = importlib.import_module("he_keras.experiment.catalog.cifar10_search_scale_margin")
    settings = search.SearchSettings(**preset.get_search())
    points = {(point["scale"], point["margin"]) for point in settings.parsed_space().grid()}
    expected = {(15.0, margin / 10) for margin in range(6)}
    assert points == expected | {(scale, 0.2) for scale in (1.0, 5.0, 10.0, 20.0)}
    assert settings.tuner == "grid" and preset.get_config().objective.name == "trades"


# Settings and roles


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tuner": "annealing"}, r"Unknown tuner; expected one of \('random', .*'annealing'"),
        ({"max_trials": -1}, "Invalid max_trials"),
        ({"max_failures": 0}, "Invalid max_failures"),
        ({"factor": 1}, "Invalid factor"),
        ({"worker_timeout": 0}, "Invalid worker_timeout"),
        ({"tuner": "grid"}, "A grid needs values; .* received a range of scale, margin"),
        ({"space": [{"scale": 1}]}, "A list of points is a grid; expected tuner='grid'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        search.SearchSettings(**settings)


def test_number_of_trials():
    assert search.SearchSettings().num_trials == 10
    assert search.SearchSettings(max_trials=3).num_trials == 3
    assert search.SearchSettings(tuner="hyperband").num_trials == 0


@pytest.mark.parametrize(
    ("tuner_id", "port", "expected"), [("chief", 8000, "chief"), ("w1", 8000, "worker")]
)
def test_role(monkeypatch, tuner_id, port, expected):
    assert search.role() == "alone"
    search_folders.become(monkeypatch, tuner_id, port)
    assert search.role() == expected


@pytest.mark.parametrize(
    ("tuner_id", "address", "port"),
    [
        ("", "127.0.0.1", 8000),
        ("w1", "127.0.0.1", ""),
        ("w1", "127.0.0.1", "x"),
        ("w1", "127.0.0.1", 70000),
        # Without the chief's address each worker would do the whole search, in one folder.
        ("w1", "", 8000),
        ("w1", "", ""),
    ],
)
def test_incomplete_addresses(monkeypatch, tuner_id, address, port):
    search_folders.become(monkeypatch, tuner_id, port)
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", address)
    with pytest.raises(ValueError, match="Incomplete addresses of the search; expected KERASTUNER"):
        search.role()


# The objective


@pytest.mark.parametrize(
    ("objective", "loss", "steps"),
    [("margin-pgd-20", "cw", 20), ("dlr-pgd-7", "dlr", 7), ("apgd-dlr-5", "dlr", 5)],
)
def test_objectives(objective, loss, steps):
    attack = search.scale_free_attack(objective, THREAT, num_classes=10, seed=3)
    assert (attack.loss, attack.num_steps, attack.seed) == (loss, steps, 3)


@pytest.mark.parametrize(
    "objective",
    [
        *("pgd-20", "apgd-ce-20", "margin-pgd", "margin-pgd-0", "margin-pgd-x", "margin-pgd-²"),
        *("robust_accuracy", ""),
    ],
)
def test_wrong_objectives(objective):
    with pytest.raises(ValueError, match="Unknown objective of a search; expected one of margin"):
        search.scale_free_attack(objective, THREAT, num_classes=10, seed=0)


@pytest.mark.parametrize("objective", ["dlr-pgd-5", "apgd-dlr-5"])
def test_dlr_needs_three_classes(objective):
    with pytest.raises(ValueError, match="classes"):
        search.scale_free_attack(objective, THREAT, num_classes=2, seed=0)
    assert search.scale_free_attack("margin-pgd-5", THREAT, num_classes=2, seed=0)


def hand_made(scale):
    """Robust and of small scale; or of large scale, with a border that attacks can reach."""
    model = he.HEAdversarialModel(
        keras_identity(), he.CosineHead(2, scale=scale), he.objectives.PGDAT(THREAT, num_steps=1)
    )
    kernel = np.eye(2) if scale < 100 else np.array([[1.0, 0.5], [0.0, 1.0]])
    model.head.kernel.assign(kernel)
    return model


def keras_identity():
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Activation("linear")])


IMAGES = np.array(
    [[0.71, 0.29], [0.712, 0.288], [0.708, 0.292], [0.711, 0.289], [0.45, 0.55]], "float32"
)
LABELS = np.array([0, 0, 0, 0, 1])


def grid_over_scale(folder, attack):
    """The scale that a search picks whose trials are scored by this attack."""

    def run(values, folder, epochs):
        result = attack(hand_made(values["scale"]), IMAGES, LABELS)
        return {"clean_accuracy": 1.0, "robust_accuracy": result.robust_accuracy, "seconds": 0.0}

    settings = search.SearchSettings(tuner="grid", space={"scale": [10, 10000]})
    found = search_folders.run(settings, folder, run)
    return search.best(found)["scale"], [row["robust_accuracy"] for row in found]


@pytest.mark.slow
def test_cross_entropy_would_pick_the_scale_that_hides_the_gradient(tmp_path):
    """Eps 0.1: of the small scale four of five withstand any attack, of the large one one."""
    naive = he.attacks.get("pgd-20", THREAT, loss="ce")
    scale, accuracies = grid_over_scale(tmp_path / "naive", naive)
    assert scale == 10000 and accuracies == pytest.approx([0.8, 1.0])
    ours = search.scale_free_attack("margin-pgd-20", THREAT, num_classes=2, seed=0)
    scale, accuracies = grid_over_scale(tmp_path / "ours", ours)
    assert scale == 10 and accuracies == pytest.approx([0.8, 0.2])


# What the tuners try


@pytest.mark.parametrize(
    "tuner", ["random", pytest.param("bayesian", marks=pytest.mark.slow), "hyperband"]
)
def test_tuners_stay_inside_the_space(tmp_path, tuner):
    trials = Trials()
    settings = search.SearchSettings(tuner=tuner, space=SPACE, max_trials=8)
    rows = search_folders.run(settings, tmp_path, trials)
    assert len(rows) == len(trials.calls) == 8
    assert all(5 <= row["scale"] <= 30 for row in rows)
    assert {row["margin"] for row in rows} <= {0.0, 0.1, 0.2, 0.3}
    assert len({row["scale"] for row in rows}) > 1


def test_grid_tries_every_point_once_and_in_order(tmp_path):
    settings = search.SearchSettings(tuner="grid", space={"scale": "5,10", "margin": "0,0.2"})
    rows = search_folders.run(settings, tmp_path)
    tried = [(row["scale"], row["margin"]) for row in rows]
    assert tried == [(5.0, 0.0), (5.0, 0.2), (10.0, 0.0), (10.0, 0.2)]


def test_the_seed_decides_what_is_tried(tmp_path):
    settings = search.SearchSettings(space=SPACE, max_trials=3)
    one, same, other = (
        [row["scale"] for row in search_folders.run(settings, tmp_path / name, seed=seed)]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    # keras-tuner itself takes the seed 0 for none.
    assert one == same != other


@pytest.mark.slow
def test_bayesian_search_comes_closer_than_its_random_start(tmp_path):
    settings = search.SearchSettings(tuner="bayesian", space={"scale": "1:64"}, max_trials=9)
    rows = search_folders.run(settings, tmp_path)
    distances = [abs(row["scale"] - 12.0) for row in rows]
    assert min(distances[3:]) < min(distances[:3])


def test_hyperband_trains_the_better_ones_longer_and_in_one_folder(tmp_path):
    trials = Trials()
    settings = search.SearchSettings(tuner="hyperband", space={"scale": "1:64"})
    rows = search_folders.run(settings, tmp_path, trials)
    assert {row["epochs"] for row in rows} == {1, 3, 9}
    first = [row for row in rows if row["epochs"] == 1]
    best = max(first, key=lambda row: row["robust_accuracy"])
    goes_on = [row for row in rows if row["run"] == best["run"]]
    assert [row["epochs"] for row in goes_on] == [1, 3, 9]
    assert {row["scale"] for row in goes_on} == {best["scale"]}
    # The number of trials can be limited, which keras-tuner's own hyperband cannot.
    few = search.SearchSettings(tuner="hyperband", space={"scale": "1:64"}, max_trials=4)
    assert len(search_folders.run(few, tmp_path / "few")) == 4


# The result


def test_front():
    points = [(0.9, 0.3), (0.8, 0.5), (0.8, 0.4), (0.7, 0.5), (0.8, 0.5), (0.95, 0.1)]
    assert on_front(points) == [True, True, False, False, True, True]


def test_labels_of_close_points_do_not_cover_each_other(tmp_path, monkeypatch):
    from matplotlib.text import Text

    points = [(0.9, 0.4), (0.899, 0.4005), (0.895, 0.401), (0.7, 0.5), (0.9, 0.4)]
    rows = [
        {**row(str(number), *point), "pareto": True, "scale": 15.0 + number, "margin": 0.25}
        for number, point in enumerate(points)
    ]
    figures = []

    def save(figure, path):
        figures.append(figure)
        return drawing.save_figure(figure, path)

    monkeypatch.setattr(pareto, "save_figure", save)
    draw_pareto(rows, rows[3], tmp_path / "pareto.png", "margin-pgd-20")
    texts = figures[0].axes[0].texts
    # Without the lines from the labels to their points.
    boxes = [Text.get_window_extent(text) for text in texts]
    assert sorted(text.get_text().count("s ") for text in texts) == [1, 1, 1, 2]
    assert not any(
        one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number]
    )


def row(trial, clean, robust, epochs=9, status="completed"):
    return {
        "trial": trial,
        "status": status,
        "clean_accuracy": clean,
        "robust_accuracy": robust,
        "epochs": epochs,
    }


def test_best():
    assert search.best([]) is None
    assert search.best([row("a", None, None, None, "failed")]) is None
    rows = [row("a", 0.8, 0.5), row("b", 0.9, 0.5), row("c", 0.9, 0.5), row("d", 1, 0.4)]
    assert search.best(rows)["trial"] == "b"
    # Of a trial that hyperband ended early nobody knows what training to the end gives.
    assert search.best([*rows, row("e", 1.0, 0.9, epochs=3)])["trial"] == "b"


def test_tables(tmp_path):
    def strike(number, values):
        if number == 2:
            raise FloatingPointError("loss is NaN")

    settings = search.SearchSettings(space=SPACE, max_trials=4)
    rows = search_folders.run(settings, tmp_path, Trials(strike))
    search.write_tables(tmp_path, rows, {"objective": "margin-pgd-20", "seed": 0, "threat": "linf"})
    stored = search.read_tables(tmp_path)
    assert stored["trials"] == rows and stored["seed"] == 0
    assert stored["best"] == search.best(rows)["trial"]
    with open(tmp_path / "trials.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [line["status"] for line in table] == ["completed", "failed", "completed", "completed"]
    assert table[1]["error"] == "FloatingPointError: loss is NaN"
    assert table[1]["robust_accuracy"] == ""
    assert float(table[2]["scale"]) == rows[2]["scale"]
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    assert search.read_tables(tmp_path / "elsewhere") == {}
