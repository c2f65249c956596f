"""The pages on public checkpoints: their tables are complete, and the hours are right."""

import dataclasses
import pathlib
import re

import pytest

import he_keras as he

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")


def test_every_recipe_and_every_field_is_on_the_page():
    layouts = PAGE.partition("## Layouts")[2].partition("##")[0]
    assert {name for name in he.zoo.recipes() if f"`{name}`" not in layouts} == set()
    schema = RECIPES.partition("## A recipe")[2].partition("##")[0]
    for kind in (he.zoo.Recipe, he.zoo.Entry):
        fields = [field.name for field in dataclasses.fields(kind)]
        assert [name for name in fields if f"`{name}`" not in schema] == []


def test_hours_follow_from_the_published_figures():
    attack = he.attacks.get("autoattack", he.ThreatModel("linf", "8/255"))
    every = attack.most_passes(10)
    first_two = sum(part.most_passes(10) for part in attack.components[:2])
    assert f"{every:,}" in PAGE and f"{first_two:,}" in PAGE
    entries = {entry.name: entry for entry in he.zoo.entries()}
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for name, multiply_adds, rest in rows:
        entry = entries[name]
        robust = round(100 * entry.robust)
        broken = round(100 * entry.clean) - robust
        passes = robust * every + broken * first_two
        operations = 2 * passes * float(multiply_adds) * 1e9
        hours = operations / 3600
        expected = [robust, broken, passes / 1e6, operations / 1e15, hours / 1e11, hours / 5e13]
        shown = [float(cell.replace(",", "")) for cell in rest.split("|")]
        assert shown == pytest.approx(expected, rel=2e-3, abs=0.051)


def test_the_page_names_protocols_that_there_are():
    from he_keras.evaluation import protocols

    for name in re.findall(r"--protocol=(\S+)", PAGE):
        assert protocols.get(name, 8).name == name
