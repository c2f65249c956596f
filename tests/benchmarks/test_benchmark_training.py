"""The training benchmarks: what they count, compare and store."""

import json

import keras
import numpy as np
import pytest

import he_keras as he
from he_keras.benchmarks import convolutions, growth, guard, head, profile, training
from he_keras.benchmarks.training import Cell, Result


def result(**seconds):
    """A result of one second a step, and what the others took."""
    names = {"bound": "convolutions", "linear": "he_keras-linear"}
    timed = {"he_keras": 1.0}
    timed |= {names.get(name, f"torch:{name}"): value for name, value in seconds.items()}
    cell = Cell("pgd_at", "float32", "preact-resnet-small", 10)
    return Result(cell, timed, {"he_keras": 2.0}, {"he_keras": 10**6}, 5 * 10**8, 4e10, 0.0, 0.0)


def test_ratios():
    found = result(bound=0.9, linear=0.8, eager=1.5, fast=1.2)
    assert found.best_peer == "torch:fast"
    assert found.ratio == 1.2
    assert found.share_of_bound == 0.9
    assert found.head_cost == 1.25
    assert found.flops == 2 * 5e8 * 10
    assert training.line(found).split()[7:10] == ["0.25", "0.900", "1.250"]


def test_without_peers_there_is_no_ratio():
    found = result()
    assert np.isnan([found.ratio, found.share_of_bound, found.head_cost]).all()
    assert training.summary([found]).endswith("no peer measured")


def test_geometric_mean_by_objective():
    text = training.summary([result(eager=1.0), result(eager=4.0)])
    assert text == "geometric mean of the ratios: pgd_at 2.000 (lowest 1.000)"


def test_tools_that_do_other_work_are_not_compared():
    ours = {"loss": 2.0, "logits": np.array([1.0, -4.0])}
    same = {"loss": 2.02, "logits": np.array([1.0, -3.96])}
    cell = Cell("pgd_at", "float32", "preact-resnet-small", 10)
    loss, logit = training._checked(cell, {"he_keras": ours, "torch:eager": same})
    assert (loss, logit) == pytest.approx((0.01, 0.01))
    other = {**same, "loss": 2.2}
    with pytest.raises(RuntimeError, match="do not do the same work"):
        training._checked(cell, {"he_keras": ours, "torch:eager": other})


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "positions"),
    [(3, 1, "SAME", 64), (3, 2, "SAME", 16), (3, 1, "VALID", 36), (1, 1, "VALID", 64)],
)
def test_multiply_accumulates(kernel, stride, padding, positions):
    one = convolutions.Convolution((8, 8, 2), (kernel, kernel, 2, 5), stride, padding)
    assert one.multiply_accumulates == positions * kernel * kernel * 2 * 5


def test_every_convolution_of_a_network_is_counted():
    network = he.networks.get("preact-resnet-small", (32, 32, 3))
    found = convolutions.convolutions_of(network)
    layers = [layer for layer in network.layers if isinstance(layer, keras.layers.Conv2D)]
    assert len(found) == len(layers) == 9
    assert 47e6 < sum(each.multiply_accumulates for each in found) < 50e6


def test_regressions_are_those_beyond_the_tolerance():
    stored = {
        f"net pgd_at float32 {name}": 1.0 for name in ("share_of_bound", "head_cost", "over_torch")
    }
    slower = {
        "net pgd_at float32 share_of_bound": 0.7,
        "net pgd_at float32 head_cost": 1.4,
        "net pgd_at float32 over_torch": 0.8,
        "other net pgd_at float32 head_cost": 9.0,
    }
    found = [line.split(":")[0].rsplit(" ", 1)[1] for line in guard.regressions(slower, stored)]
    assert found == ["share_of_bound", "head_cost"]
    assert guard.regressions({name: float("nan") for name in stored}, stored)
    faster = {name: 0.5 if name.endswith("cost") else 2.0 for name in stored}
    assert guard.regressions(faster, stored) == []


@pytest.mark.parametrize(("again", "is_worse"), [(1.0, False), (1.6, True)])
def test_what_seems_slower_is_measured_twice(again, is_worse, monkeypatch, tmp_path):
    """One disturbed round is forgiven; what stays slower is a regression."""
    name = "preact-resnet-small pgd_at float32"
    path = tmp_path / "stored.json"
    ratios = {f"{name} share_of_bound": 0.9, f"{name} head_cost": 1.0}
    path.write_text(json.dumps({"ratios": ratios}), encoding="utf-8")
    linear = iter([1 / 1.5, 1.0 / again, 1.0])
    monkeypatch.setattr(guard, "STORED", path)
    monkeypatch.setattr(training, "measure_cell", lambda *_: result(bound=0.9, linear=next(linear)))
    found = guard.measure(True, [], 1)
    assert bool(guard.regressions(found, ratios)) == is_worse
    assert found[f"{name} head_cost"] == pytest.approx(min(1.5, again) if is_worse else 1.0)


def test_growth_fits_a_line_to_the_attack_alone():
    steps = {count: 0.5 + 0.2 * count + (0.1 if count else 0.0) for count in (0, 1, 5, 10)}
    first, looks = dict.fromkeys(steps, 1.0), [(1, 1)]
    found = growth.Growth("net", "float32", steps, first, {16: 1.0}, looks, looks)
    assert found.line == pytest.approx((0.2, 0.1))
    assert found.intercept == pytest.approx(0.1 / 2.6)


@pytest.mark.slow
def test_a_cell(tmp_path):
    tools = ["he_keras", "he_keras-linear", "convolutions"]
    cells = training.cells(["free_at"], ["float32"], ["preact-resnet-small"], [4])
    text = training.measure(cells, tools, 1, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    (found,) = written["cells"]
    assert "free_at" in text and found["cell"]["objective"] == "free_at"
    alone, step = found["seconds"]["convolutions"], found["seconds"]["he_keras"]
    assert found["share_of_bound"] == pytest.approx(alone / step) and alone > 0
    assert found["first_step"]["he_keras"] > 0 and step > 0
    assert found["peak_memory"]["he_keras"] > 0


class StandIn:
    """Asks one process in place of one for each point: seven would compile the same step."""

    def __init__(self, worker):
        self.ask = worker.ask

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        pass


@pytest.mark.slow
def test_growth(tmp_path, monkeypatch):
    """The smallest run of all parts, and its picture."""
    cell = Cell("pgd_at", "float32", "preact-resnet-small", 4, num_steps=1)
    with growth.Worker("he_keras", cell) as worker:
        monkeypatch.setattr(growth, "Worker", lambda *_: StandIn(worker))
        found = growth.measure("preact-resnet-small", "float32", 1, (1, 2), (4,), 4, 10)
    assert set(found.over_steps) == {0, 1, 2} and set(found.over_batch) == {4}
    assert [count for count, _ in found.memory] == list(range(1, 11))
    assert [count for count, _ in found.evaluated] == list(range(10, 101, 10))
    assert all(resident > 1e8 for _, resident in found.memory + found.evaluated)
    growth.draw(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_the_interval_of_a_ratio():
    """Of 100 ratios the median lies, in 95 of 100 cases, between the 40th and the 61st."""
    ratios = [1.0 + place / 100 for place in range(100)]
    assert head.ratio(ratios, [1.0] * 100) == pytest.approx((1.495, 1.40, 1.59))
    assert head.ratio([3.0, 1.0], [1.0, 1.0]) == (2.0, 1.0, 3.0)


@pytest.mark.slow
def test_head():
    """Each model steps once a round, and all columns are filled."""
    cell = Cell("fast_at", "float32", "preact-resnet-small", 4)
    seconds = head.measure_cell(cell, 3)
    assert set(seconds) == set(head.HEADS)
    assert all(len(each) == 3 and min(each) > 0 for each in seconds.values())
    assert "nan" not in head.line(cell, seconds)


@pytest.mark.slow
def test_profile():
    """Every operation of a step has a kind, convolutions among them."""
    text = profile.measure(Cell("fast_at", "float32", "preact-resnet-small", 16))
    lines = {line[:40].strip(): line[40:].split() for line in text.splitlines()[2:]}
    shares = {kind: float(share.rstrip("%")) for kind, (_, share) in lines.items()}
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert any(kind.startswith("convolutions") for kind in shares)
    assert float(text.splitlines()[0].split()[-2]) > 0
