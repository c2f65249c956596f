"""Every check on every broken model, and the table of docs/reference/checks.md that says so."""

import functools
import pathlib

import keras
import pytest
from broken_models import HONEST, MUST_FIRE, SKIPPED_WITHOUT_EVALUATION, checks, row_of

from he_keras.evaluation.checks.table import CHECKS

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md"
AFTER = tuple(row.name for row in CHECKS if row.when == "after")
RANDOM = ("noise_layer", "stochastic_activation")
pytestmark = pytest.mark.slow


@functools.cache
def found(name, seed=0):
    keras.utils.set_random_seed(seed)
    return checks(name, seed)


def documented(name):
    """The model's row of the table in the documentation."""
    start = f"| {name.replace('_', ' ')} | "
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith(start)]
    return line


@pytest.mark.parametrize("name", HONEST)
def test_what_passes_and_what_is_skipped_on_an_honest_model(name):
    assert [check for check in found(name) if check.fired] == []
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
    if name in RANDOM:
        cells = documented(name).split(" | ")
        for check in found(name):
            if check.name in must_fire:
                assert check.name in cells[("fail", "warn").index(check.verdict) + 1].split(", ")
    else:
        assert documented(name) == row_of(name, found(name))


def test_every_check_has_a_section_in_the_documentation():
    text = DOCS.read_text()
    missing = [check.name for check in found("honest") if f"\n### {check.name}\n" not in text]
    assert missing == []
