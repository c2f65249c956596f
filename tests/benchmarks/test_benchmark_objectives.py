"""The cost of a step of LLR, and what its passes predict."""

import pytest

from he_keras.benchmarks.objectives import Cost, measure


def test_prediction_counts_the_passes():
    """One second a forward pass, one an input gradient, two a full backward pass."""
    cost = Cost(num_steps=10, forward=1.0, forward_backward=2.0, training=3.0, step=62.0)
    assert cost.predicted == 11 * (1 + 1) + 2 * 1 + 1 + 3 * 2
    assert cost.ratio == 2.0
    fewer = cost._replace(num_steps=2)
    assert fewer.predicted == cost.predicted - 8 * 2


@pytest.mark.slow
def test_table():
    lines = measure("wide-resnet-10-1", 4, (1,), ("moving",), rounds=1).splitlines()
    assert lines[0].startswith("wide-resnet-10-1, batch 4, best of 1")
    assert [line.split()[:2] for line in lines[2:]] == [["moving", "1"]]
    assert all(len(line.split()) == len(lines[1].replace(" + ", "+").split()) for line in lines[2:])
