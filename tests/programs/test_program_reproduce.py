"""The program `reproduce`: its list, its estimate, and its answers to mistakes."""

import functools

import pytest
from programs import assert_one_line_error, run_here

from he_keras.benchmarks import cost
from he_keras.reproduction import costs


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(cost, "multiply_adds", lambda *given, **options: 10**9)
    monkeypatch.setattr(costs, "speed_here", lambda network: 1e11)
    answer = functools.partial(run_here, monkeypatch, capfd, "reproduce")
    return functools.partial(answer, f"--output_dir={tmp_path}")


def test_list_shows_a_table_cell_by_cell(run):
    code, out, err = run("he_table_6", "--list")
    assert (code, err) == (0, "")
    assert "he_table_6, scale paper, seeds 0" in out
    assert "rebuttal" in out and "50 TFLOP/s, assumed" in out
    assert "public checkpoint: at_he/wrn-34-20 (--checkpoint='PGD-AT+HE WRN-34-20:FILE')" in out
    line = next(line for line in out.splitlines() if "rays" in line)
    assert "57.80" in line and "not started" in line and "rays-10000/first 1000" in line


def test_list_says_why_a_cell_is_not_reproduced(run):
    code, out, _ = run("rat_table_8", "--list")
    assert code == 0
    assert "not reproduced: GAT is another method" in out


def test_dry_run_prints_the_cost_and_stops(run, tmp_path):
    code, out, err = run("he_rebuttal_minutes", "--dry_run", "--seeds=2", "--rows=PGD-AT")
    assert (code, err) == (0, "")
    assert "he_rebuttal_minutes, scale paper: 2 runs" in out
    one = 100 * 49_000 * 23 * 2e9
    assert f"{one / 1e15:.4f}" in out and f"all: {2 * one / 1e11 / 3600:,.2f} h here" in out
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "No table; expected he-keras reproduce TABLE, or --list"),
        (["he_table_1"], "Unknown table; expected"),
        (["all", "--rows=PGD-AT"], "Rows belong to one table"),
        (["he_table_2", "--rows=PGDAT", "--dry_run"], "Unknown row of he_table_2"),
        (["he_table_2", "--checkpoint=PGD-AT:nowhere.pt"], "No checkpoint; expected a file"),
        (["he_table_2", "--scale=large"], "--scale"),
        (
            ["rat_table_8", "--checkpoint=GAT:tests/conftest.py"],
            "Nothing in this row can be measured on a file; expected a row with an accuracy",
        ),
        (
            # Its only cell is a time of training.
            ["he_rebuttal_minutes", "--checkpoint=PGD-AT:tests/conftest.py"],
            "Nothing in this row can be measured on a file; expected a row with an accuracy",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line(run, arguments, part):
    assert_one_line_error(run(*arguments), part)
