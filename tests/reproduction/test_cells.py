"""Every cell of every table: an experiment that is there, or one sentence why not."""

import pytest

from he_keras import experiment
from he_keras.evaluation import protocols
from he_keras.experiment import catalog
from he_keras.experiment.catalog import papers
from he_keras.reproduction import cells, scales

TABLES = [name for name in cells.names() if cells.figure_of(name) is None]
FIGURES = [name for name in cells.names() if cells.figure_of(name) is not None]
CELLS = [cell for table in TABLES for cell in cells.cells_of(table)]
CIFAR10_C = ("PGD-AT", "PGD-AT+HE", "ALP", "ALP+HE", "TRADES", "TRADES+HE")


def models():
    of_figures = [cells.figure_of(name).models.values() for name in FIGURES]
    found = dict.fromkeys(cell.model for cell in CELLS if cell.model)
    return list(found | dict.fromkeys(model for each in of_figures for model in each))


def test_all_tables_and_figures_of_the_sources_are_there():
    numbered = {f"he_table_{number}" for number in range(2, 13)}
    assert numbered <= set(TABLES)
    assert {"he_figure_2_left", "he_figure_2_right", "he_figure_3", "he_figure_4"} <= set(FIGURES)
    assert (len(TABLES), len(FIGURES), len(CELLS)) == (20, 5, 1080)
    for name in cells.names():
        about = cells.describe(name)
        assert about["source"] and about["metric"]
        assert all(note.endswith(".") for note in about.get("notes", []))


def test_a_cell_has_an_experiment_or_one_sentence_why_not():
    experiments = {entry.name for entry in catalog.entries()}
    for cell in CELLS:
        if cell.model is None:
            assert cell.why_not.endswith(".") and len(cell.why_not.split()) > 5, cell
            assert not cell.measurements
        else:
            assert cell.model.experiment in experiments and cell.measurements, cell
            assert not cell.note or cell.note.endswith("."), cell
    assert {model.experiment for model in models()} <= experiments


def test_every_attack_and_setting_of_a_cell_exists():
    attacks = {
        name: [each.name for each in protocols.get(name).attacks] for name in protocols.names()
    }
    for measurement in dict.fromkeys(each for cell in CELLS for each in cell.measurements):
        if measurement.protocol:
            assert measurement.name in attacks[measurement.protocol], measurement
        elif measurement.kind == "attack":
            assert measurement.epsilon, measurement
    settings = [
        (cell, each) for cell in CELLS for each in cell.measurements if each.kind == "setting"
    ]
    assert settings
    for cell, measurement in settings:
        section, key = measurement.name.split(".")
        assert scales.configuration(cell.model, "paper")[section][key] == cell.published


def test_a_measurement_has_a_name_of_its_own():
    found = dict.fromkeys(each for cell in CELLS for each in cell.measurements)
    assert len({each.key() for each in found}) == len(found)


def test_tables_2_and_10_print_the_same_numbers_twice():
    second, tenth = (papers.tables()[f"he_table_{number}"]["rows"] for number in (2, 10))
    for row in CIFAR10_C:
        assert second[row] == {**second[row], **tenth[row]}


@pytest.mark.parametrize("row", CIFAR10_C)
def test_table_5_is_the_mean_over_the_severities_of_table_11(row):
    """Some means are truncated, one is 0.02 off; the notes of the table name the exceptions."""
    full = papers.tables()["he_table_11"]["rows"]
    severities = [full[f"{row}, severity {severity}"] for severity in range(1, 6)]
    swapped = {"defocus_blur": "glass_blur", "glass_blur": "defocus_blur"}
    for column, printed in papers.row("he_table_5", row).items():
        source = swapped.get(column, column) if row == "ALP+HE" else column
        columns = list(severities[0]) if column == "mCA" else [source]
        numbers = [each[name] for each in severities for name in columns]
        if printed is not None and None not in numbers:
            assert printed == pytest.approx(sum(numbers) / len(numbers), abs=0.03), column


def test_equal_runs_are_shared_between_tables():
    def identity(table, row, column, scale="paper"):
        (cell,) = [each for each in cells.cells_of(table, [row]) if each.column == column]
        return scales.identity(scales.configuration(cell.model, scale))

    trades = identity("he_table_2", "TRADES+HE", "pgd20")
    assert identity("he_table_9", "s = 15, m = 0.2", "pgd20") == trades
    assert identity("he_table_11", "TRADES+HE, severity 3", "fog") == trades
    assert identity("he_table_9", "s = 15, m = 0.1", "pgd20") != trades
    assert identity("he_table_8", "ZOO", "TRADES+HE") == trades
    networks = [
        identity("he_table_4", f"{network} FreeAT", "clean", "smoke")
        for network in ("ResNet-50", "WRN-101-2")
    ]
    assert networks[0] == networks[1]


def test_another_seed_is_another_run():
    model = cells.Model("cifar10_trades_he")
    digits = {scales.identity(scales.configuration(model, "paper", seed)) for seed in range(3)}
    assert len(digits) == 3


@pytest.mark.parametrize("scale", scales.SCALES)
def test_every_model_has_a_valid_configuration_at_every_scale(scale):
    for model in models():
        config = scales.configuration(model, scale)
        experiment.check_config(config)
        if scale == "paper":
            original = catalog.get_config(model.experiment)
            assert (config.network, config.threat) == (original.network, original.threat) or (
                model.changes
            )


def test_the_paper_scale_changes_nothing_but_what_the_cell_says():
    model = cells.Model("cifar10_trades_he", (("head.scale", 5.0),))
    assert scales.differences(model, "paper") == ()
    config = scales.configuration(model, "paper")
    original = catalog.get_config("cifar10_trades_he")
    assert config.head.scale == 5.0 and original.head.scale == 15.0
    for section in ("data", "network", "threat", "objective", "optimizer", "schedule", "train"):
        assert config[section].to_dict() == original[section].to_dict()


def test_the_cpu_scale_keeps_head_threat_and_objective():
    model = cells.Model("cifar10_trades_he", (("head.scale", 5.0), ("network.name", "lenet")))
    config = scales.configuration(model, "cpu")
    assert (config.head.scale, config.head.kind, config.threat.epsilon) == (5.0, "he", "0.031")
    assert (config.objective.name, config.objective.num_steps) == ("trades", 5)
    assert (config.network.name, config.data.name) == ("preact-resnet", "cifar10")
    changed = scales.differences(model, "cpu")
    assert "train.epochs: 100 -> 5" in changed and "objective.num_steps: 10 -> 5" in changed
    imagenet = scales.configuration(cells.Model("imagenet_free_at_resnet_50_he"), "cpu")
    assert (imagenet.data.name, imagenet.head.num_classes) == ("cifar10", 10)
    restarts = scales.configuration(cells.Model("cifar10_pas_vgg16_linear_restarts"), "cpu")
    assert tuple(restarts.train.cycle_ends) == (2, 3, 4, 6)


def test_an_unknown_table_or_row_is_answered():
    with pytest.raises(ValueError, match="Unknown table; expected .* did you mean 'he_table_2'"):
        cells.cells_of("he_table2")
    with pytest.raises(ValueError, match="Unknown row of he_table_2; expected one of PGD-AT"):
        cells.cells_of("he_table_2", ["TRADES+HEE"])
