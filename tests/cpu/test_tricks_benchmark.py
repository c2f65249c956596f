"""The benchmark of the tricks: its variants, its table, and one run of it."""

import pytest

from he_keras import cpu
from he_keras.benchmarks import tricks
from he_keras.benchmarks.training import Cell

CELL = Cell("pgd_at", "float32", "preact-resnet-small", 2, num_steps=1)


def test_there_is_a_variant_for_each_trick_of_a_dtype():
    single, half = (tricks.variants(dtype) for dtype in ("float32", "mixed_bfloat16"))
    alone = {off[0] for variants in (single, half) for off in variants.values() if len(off) == 1}
    assert alone == set(cpu.TRICKS)
    assert "no bfloat16_relu" not in single and "no bfloat16_relu" in half
    assert single["no trick"] == tuple(cpu.TRICKS) and single["all tricks"] == ()


def test_a_trick_earns_what_the_step_takes_longer_without_it():
    text = tricks.table(CELL, {"all tricks": (0.75, 2.0), "no folded_norms": (1.0, 2.0)})
    assert text.splitlines()[-1].split() == [
        "no",
        "folded_norms",
        "1.000",
        "25.0%",
        "2.000",
        "0.0%",
    ]


@pytest.mark.slow
def test_one_round(monkeypatch):
    monkeypatch.setattr(
        tricks, "variants", lambda dtype: {"all tricks": (), "none": ("folded_norms",)}
    )
    best = tricks.measure_cell(CELL, rounds=1, budget=1.0)
    assert list(best) == ["all tricks", "none"]
    assert all(0.0 < seconds < 600.0 for pair in best.values() for seconds in pair)
