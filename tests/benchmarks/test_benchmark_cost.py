"""The arithmetic of the costs in docs/research/cost.md."""

import pytest

from he_keras.benchmarks import cost
from he_keras.benchmarks.convolutions import PassCounts


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ({"name": "pgd_at", "num_steps": 10}, (11, 11, 1)),
        ({"name": "alp", "num_steps": 10}, (12, 12, 2)),
        ({"name": "trades", "num_steps": 10}, (13, 12, 2)),
        ({"name": "free_at", "num_replays": 8}, (8, 8, 8)),
        ({"name": "fast_at"}, (2, 2, 1)),
        ({"name": "standard"}, (1, 1, 1)),
        ({"name": "mart", "num_steps": 10}, (12, 12, 2)),
        ({"name": "llr", "num_steps": 2}, (5, 7, 3)),
        ({"name": "rat", "base": "trades", "num_steps": 10}, (13, 12, 2)),
        ({"name": "rat", "base": "pgd_at", "num_steps": 10}, (12, 12, 2)),
        ({"name": "awp", "base": {"name": "pgd_at", "num_steps": 10}}, (12, 12, 2)),
    ],
)
def test_passes_are_those_of_the_training_page(objective, expected):
    """f, b and B = b + weights, by docs/reference/objectives.md."""
    assert cost.passes_of(objective) == PassCounts(*expected)


def test_a_row_is_counted_from_its_configuration():
    """FastAT: 30 epochs of 49,000 images in batches of 128."""
    row = cost.cost_of("3", "FastAT", "cifar10_fast_at_he")
    assert (row.epochs, row.examples, row.steps) == (30, 49_000, 30 * 383)
    assert row.operations == 30 * 49_000 * 5 * 2.0 * row.multiply_adds
    assert row.hours(row.operations / 7200) == pytest.approx(2.0)


def test_multiply_adds_of_a_network_counted_by_hand():
    """PreActResNet of one block of width 4, 8 x 8 grey images: 3 x 3 kernels only."""
    stem, block = 64 * 9 * 1 * 4, 2 * 64 * 9 * 4 * 4
    import he_keras as he

    small = he.networks.get("preact-resnet", (8, 8, 1), stage_widths=(4,), blocks_per_stage=(1,))
    counted = [each.multiply_accumulates for each in cost.convolutions_of(small)]
    assert sum(counted) == stem + block
