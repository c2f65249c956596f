"""What is measured is recorded once, and written beside what is published, deviations marked."""

import csv
import json

import pytest
from PIL import Image

from he_keras.reproduction import cells, costs, reproduce, scales, table
from he_keras.reproduction.cells import Measurement, Model
from he_keras.reproduction.costs import Costs
from he_keras.reproduction.measure import Measuring
from he_keras.reproduction.models import Run, Runs

TRADES_HE = Model("cifar10_trades_he")


def recorded(runs, model, seed, **values):
    """A run whose numbers somebody has measured."""
    run = runs.of(model, seed)
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "model.keras").touch()
    keys = {"clean": "clean", "pgd20": "attack/he-table-2/pgd-20"}
    run.record({keys[name]: {"value": value, "examples": 8} for name, value in values.items()})
    return run


def filled(runs, name, row, seeds=(0,)):
    return {each.cell.column: each for each in table.fill(cells.cells_of(name, [row]), runs, seeds)}


def test_a_cell_is_the_mean_over_the_seeds(tmp_path):
    runs = Runs(tmp_path, "paper")
    for seed, share in enumerate((0.60, 0.62, 0.67)):
        recorded(runs, TRADES_HE, seed, pgd20=share)
    cell = filled(runs, "he_table_2", "TRADES+HE", range(3))["pgd20"]
    assert cell.values == pytest.approx((60.0, 62.0, 67.0))
    assert cell.mean == pytest.approx(63.0)
    assert cell.deviation == pytest.approx(13**0.5)
    assert cell.difference == pytest.approx(63.0 - 62.02)
    assert cell.status == "evaluated"


def test_a_cell_waits_for_all_seeds(tmp_path):
    runs = Runs(tmp_path, "paper")
    recorded(runs, TRADES_HE, 0, pgd20=0.6)
    row = filled(runs, "he_table_2", "TRADES+HE", range(2))
    assert (row["pgd20"].status, row["pgd20"].mean) == ("trained, not started", 60.0)
    assert (row["clean"].status, row["clean"].mean) == ("trained, not started", None)
    assert row["cw_linf"].status == "not reproduced"


def test_errors_are_what_accuracies_leave(tmp_path):
    runs = Runs(tmp_path, "paper")
    recorded(runs, Model("mnist_pas_linf_cosine"), 0, clean=0.98)
    cell = filled(runs, "pas_table_1", "MNIST Cosine")["clean"]
    assert cell.mean == pytest.approx(2.0) and cell.cell.spread == 0.02


def test_a_mean_over_corruptions_needs_all_of_them(tmp_path):
    runs = Runs(tmp_path, "paper")
    run = runs.of(Model("cifar10_pgd_at_linear"), 0)
    for severity in range(1, 6):
        found = filled(runs, "he_table_5", "PGD-AT")["fog"]
        assert found.mean is None
        key = Measurement("corruption", "fog", severity=severity).key()
        run.record({key: {"value": severity / 10, "examples": 8, "source": "generated"}})
    row = filled(runs, "he_table_5", "PGD-AT")
    assert row["fog"].mean == pytest.approx(30.0) and row["mCA"].mean is None
    assert filled(runs, "he_table_11", "PGD-AT, severity 4")["fog"].mean == pytest.approx(40.0)


@pytest.fixture
def written(tmp_path):
    runs = Runs(tmp_path, "cpu")
    recorded(
        runs,
        Model("cifar10_trades_he", (("head.scale", 5.0), ("head.margin", 0.2))),
        0,
        clean=0.8,
        pgd20=0.5,
    )
    found = table.fill(cells.cells_of("he_table_9"), runs, (0,))
    return table.write(found, "cpu", (0,), [], tmp_path / "tables")


def test_all_four_files_are_written_and_mark_what_deviates(written):
    markdown, sheet, plain, picture = written
    text = markdown.read_text()
    assert "| s = 5, m = 0.2 | 85.70 / 80.00 * | 58.75 / 50.00 * |" in text
    assert "| s = 1, m = 0.2 | 89.34 / not started | 50.33 / not started |" in text
    assert "not the paper's experiment" in text and "train.epochs: 100 -> 5" in text
    rows = list(csv.DictReader(sheet.read_text().splitlines()))
    assert len(rows) == 20
    (row,) = [row for row in rows if row["row"] == "s = 5, m = 0.2" and row["column"] == "clean"]
    assert (row["published"], row["mean"], row["scale"]) == ("85.7", "80.0", "cpu")
    assert "network.name: wide-resnet-34-10 -> preact-resnet" in row["changed_by_scale"]
    content = json.loads(plain.read_text())
    assert content["source"].endswith("Table 9") and content["environment"]["tensorflow"]
    assert len(content["cells"]) == 20 and content["deviations"]
    with Image.open(picture) as image:
        assert min(image.size) > 300


def test_what_is_recorded_is_not_measured_again(tmp_path, monkeypatch):
    run = recorded(Runs(tmp_path, "smoke"), TRADES_HE, 0, clean=0.5)
    monkeypatch.setattr(Run, "load", lambda self: pytest.fail("measured again"))
    Measuring(run, "smoke").measure([Measurement("clean")])
    assert run.results()["clean"]["value"] == 0.5


def test_a_run_is_found_by_what_it_trains(tmp_path):
    runs = Runs(tmp_path, "paper")
    first = recorded(runs, TRADES_HE, 0, clean=0.5)
    same = Model("cifar10_trades_he", (("head.scale", 15.0), ("head.margin", 0.2)))
    again = Runs(tmp_path, "paper").of(same, 0)
    assert again.folder == first.folder and again.config.name == "cifar10_trades_he"


def test_smoke_shrinks_attacks_and_cpu_takes_fewer_images():
    measuring = Measuring(Run(None, scales.configuration(TRADES_HE, "cpu")), "cpu")
    wanted = Measurement("attack", "pgd-500", "he-table-2")
    attack, text = measuring.attack_of(wanted)
    assert attack.num_steps == 500 and attack.step_size == 0.003 and "Table 2" in text
    assert scales.images_for(attack, "cpu", 10, 0) == 1000
    slow, _ = measuring.attack_of(Measurement("attack", "zoo", "he-table-8"))
    assert scales.images_for(slow, "cpu", 10, 0) == 50
    towards, _ = measuring.attack_of(Measurement("attack", "feature-50", "he-table-2"))
    assert scales.images_for(towards, "cpu", 10, 0) == 50
    assert scales.images_for(slow, "paper", 10, 1000) == 1000
    small = scales.sized(attack, "smoke")
    assert small.num_steps == 2 and small.step_size == attack.step_size
    assert scales.sized(attack, "paper") is attack


def test_attacks_with_settings_of_their_own_have_names_of_their_own():
    config = scales.configuration(Model("mnist_pas_linf_03_cosine"), "paper")
    measuring = Measuring(Run(None, config), "paper")
    row = cells.cells_of("pas_mnist_challenge", ["PAS model"])
    found = [measuring.attack_of(cell.measurements[0])[0] for cell in row]
    assert [attack.num_restarts for attack in found] == [1, 50]
    assert len({attack.name for attack in found}) == 2


def test_a_cost_is_passes_times_operations(tmp_path, monkeypatch):
    monkeypatch.setattr(costs.cost, "multiply_adds", lambda *args, **options: 1000)
    monkeypatch.setattr(costs, "speed_here", lambda network: 5.0)
    runs = Runs(tmp_path, "paper")
    wanted = [Measurement("clean"), Measurement("attack", "pgd-20", "he-table-2")]
    left = Costs(tmp_path, "paper").left(runs.of(TRADES_HE, 0), wanted)
    assert left.training == 2000.0 * 100 * 49_000 * 27
    assert left.evaluation == 2000.0 * 10_000 * (1 + 41)
    assert left.hours(left.training + left.evaluation) == pytest.approx(1 / 3600)
    assert left.hours() == pytest.approx((left.training + left.evaluation) / 5 / 3600)
    done = recorded(runs, TRADES_HE, 0, clean=0.5)
    left = Costs(tmp_path, "paper").left(done, wanted)
    assert (left.training, left.evaluation) == (0.0, 2000.0 * 10_000 * 41)


@pytest.mark.parametrize(("scale", "of_its_own"), [("paper", False), ("cpu", True)])
def test_the_speed_of_this_machine_is_that_of_the_network(scale, of_its_own, tmp_path, monkeypatch):
    """A small network reaches a smaller part of it; a large one would take long to measure."""
    measured = []

    def measured_speed(batch_size, rounds, *network, **options):
        measured.append((*network, options))
        return 1e9

    monkeypatch.setattr(costs.cost, "measured_speed", measured_speed)
    costs.speed_here.cache_clear()
    run = Runs(tmp_path, scale).of(TRADES_HE, 0)
    left = Costs(tmp_path, scale).left(run, [Measurement("clean")])
    costs.speed_here.cache_clear()
    # What is done is not measured.
    done = recorded(Runs(tmp_path, scale), TRADES_HE, 0, clean=0.5)
    assert Costs(tmp_path, scale).left(done, [Measurement("clean")]).hours() == 0.0
    network = run.config.network
    own = (network.name, tuple(network.input_shape), network.options.to_dict())
    (probed,) = measured
    assert left.speed_here == 1e9
    if of_its_own:
        assert json.dumps(probed) == json.dumps(own)
    else:
        assert probed == ({},)


def test_a_checkpoint_takes_the_place_of_a_row(tmp_path):
    file = tmp_path / "theirs.keras"
    file.write_bytes(b"a model")
    of_table = cells.cells_of("he_table_6")
    runs = Runs(tmp_path, "paper")
    runs.take_checkpoint(of_table, f"PGD-AT+HE WRN-34-20:{file}")
    row = filled(Runs(tmp_path, "paper"), "he_table_6", "PGD-AT+HE WRN-34-20")
    assert row["clean"].status == "from a public checkpoint"
    (remark,) = runs.remarks_on("he_table_6")
    assert "theirs.keras" in remark and "not trained here" in remark
    other = filled(runs, "he_table_6", "PGD-AT+HE WRN-34-10")["clean"]
    assert other.status == "not started"
    request = reproduce.Request("he_table_6", runs)
    folders = [work.run.folder.name for work in reproduce.work_of(request)]
    assert [name.partition("-")[0] for name in folders] == ["cifar10_pgd_at_he", "public"]


def test_a_checkpoint_has_no_time_of_training(tmp_path):
    file = tmp_path / "theirs.keras"
    file.write_bytes(b"a model")
    runs = Runs(tmp_path, "paper")
    runs.take_checkpoint(cells.cells_of("he_table_3"), f"FastAT:{file}")
    row = filled(runs, "he_table_3", "FastAT")
    assert row["time_min"].status == row["epochs"].status == "not reproduced"
    assert "neither settings nor times" in row["time_min"].remarks[0]


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("PGD-AT+HE:x.pt", "Unknown row in --checkpoint=ROW:FILE"),
        ("PGD-AT+HE WRN-34-20:nowhere.pt", "No checkpoint; expected a file after"),
    ],
)
def test_a_wrong_checkpoint_is_answered(tmp_path, assignment, part):
    with pytest.raises(ValueError, match=part):
        Runs(tmp_path, "paper").take_checkpoint(cells.cells_of("he_table_6"), assignment)


def test_a_file_of_unknown_layout_is_answered(tmp_path):
    file = tmp_path / "theirs.pt"
    file.touch()
    with pytest.raises(ValueError, match="No public layout is known for this row"):
        Runs(tmp_path, "paper").take_checkpoint(cells.cells_of("he_table_2"), f"ALP:{file}")
