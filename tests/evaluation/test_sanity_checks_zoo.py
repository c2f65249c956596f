"""Every check on every broken model, and the table of docs/reference/checks.md that says so."""

import functools
import pathlib

import keras
import pytest
from broken_models import HONEST, MUST_FIRE, SIGNS, SKIPPED_WITHOUT_EVALUATION, checks

from he_keras.evaluation.checks.table import CHECKS

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md"
AFTER = tuple(row.name for row in CHECKS if row.when == "after")
RANDOM = ("noise_layer", "stochastic_activation")
pytestmark = pytest.mark.slow


@functools.cache
def found(name, seed=0):
    keras.utils.set_random_seed(seed)
    return checks(name, seed)


@functools.cache
def documented():
    """{model: {check: sign}} of the table in the documentation."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    start = next(number for number, line in enumerate(lines) if line.startswith("| check | honest"))
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]
    ]
    models = [name.replace(" ", "_") for name in header[1:]]
    rows = [row for row in rows if len(row) == len(header)]
    return {model: {row[0]: row[column] for row in rows} for column, model in enumerate(models, 1)}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", HONEST)
def test_no_check_fires_on_an_honest_model(name, seed):
    assert [check for check in found(name, seed) if check.fired] == []


@pytest.mark.parametrize("name", HONEST)
def test_what_passes_and_what_is_skipped_on_an_honest_model(name):
    after = {check.name: check.verdict for check in found(name) if check.name in AFTER}
    assert tuple(after) == AFTER
    without = {"transfer-without-head"} if name == "honest" else set()
    skipped = {name for name, verdict in after.items() if verdict == "skipped"}
    assert skipped == SKIPPED_WITHOUT_EVALUATION | without
    assert set(after.values()) == {"pass", "skipped"}


@pytest.mark.parametrize("name", [*HONEST, *MUST_FIRE])
def test_the_checks_fire_as_the_documentation_says(name):
    must_fire = MUST_FIRE.get(name, set())
    assert {check.name for check in found(name) if check.fired} >= must_fire
    column = documented()[name]
    now = {check.name: SIGNS[check.verdict] for check in found(name)}
    assert set(column) == set(now)
    if name in RANDOM:
        now = {check: now[check] for check in must_fire}
        column = {check: column[check] for check in must_fire}
    assert column == now


def test_every_check_has_a_section_in_the_documentation():
    text = DOCS.read_text()
    missing = [check.name for check in found("honest") if f"\n### {check.name}\n" not in text]
    assert missing == []
