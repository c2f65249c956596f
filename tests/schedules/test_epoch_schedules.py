"""Schedules that count in epochs against an independent NumPy version, at every corner."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from learning_rates import stored_schedule

from he_keras import optimizers, schedules

SPE = 8  # a power of 2, so that t is exact in float32
CHECKPOINTS = (4.0, 10.0, 13.0)


def numpy_position(t, checkpoints):
    """r of a cycle, as the released code's loop finds it; 1 from the last checkpoint on."""
    points = [0.0, *checkpoints]
    for low, high in zip(points[:-1], points[1:], strict=True):
        if low <= t < high:
            return (t - low) / (high - low)
    return 1.0


def numpy_value(name, t, o):
    checkpoints = o.get("checkpoints", CHECKPOINTS)
    if name == "linear":
        value = o["initial"] + o["slope"] * t
    elif name == "cycle_linear":
        value = o["initial"] + (o["final"] - o["initial"]) * numpy_position(t, checkpoints)
    elif name == "cycle_cos":
        rise = 0.5 * (1 - np.cos(np.pi * numpy_position(t, checkpoints)))
        value = o["initial"] + (o["final"] - o["initial"]) * rise
    else:
        r = numpy_position(t, checkpoints)
        value = o["initial"] * o["power"] ** sum(point <= r for point in o["drop_points"])
    value = max(value, o.get("minimum", -np.inf))
    return min(value, o.get("maximum", np.inf))


CASES = [
    ("linear", {"initial": 0.05, "slope": 0.025}),
    ("linear", {"initial": 0.3, "slope": -0.05, "minimum": 0.1, "maximum": 0.2}),
    ("cycle_linear", {"initial": 0.1, "final": 0.7, "checkpoints": CHECKPOINTS}),
    ("cycle_linear", {"initial": 0.0, "final": 0.6, "checkpoints": CHECKPOINTS, "maximum": 0.4}),
    ("cycle_cos", {"initial": 0.02, "final": 0.6, "checkpoints": CHECKPOINTS, "maximum": 0.4}),
    ("cycle_cos", {"initial": 0.1, "final": 0.0, "checkpoints": CHECKPOINTS}),
    (
        "cycle_jump",
        {"initial": 0.1, "power": 0.1, "drop_points": (0.5, 0.75), "checkpoints": CHECKPOINTS},
    ),
]
# Just before, at and just after every checkpoint, jump and drop point; the start, and beyond T_n.
CORNERS = (0, 2, 3, 4, 5, 7, 8, 8.5, 10, 11, 11.5, 12.25, 13, 20)
STEPS = sorted({max(round(t * SPE) + shift, 0) for t in CORNERS for shift in (-1, 0, 1)})


def build(name, options, unit="batch", total_epochs=13):
    return schedules.get(name, total_epochs * SPE, SPE, unit=unit, **options)


@pytest.mark.parametrize("unit", schedules.by_epoch.UNITS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_at_every_corner(name, options, unit):
    schedule = build(name, options, unit)
    epochs = [step // SPE if unit == "epoch" else step / SPE for step in STEPS]
    expected = [numpy_value(name, t, options) for t in epochs]
    # An optimizer counts in int64, other callers may not.
    compiled = tf.function(schedule)
    values = [float(compiled(tf.constant(step, tf.int64))) for step in STEPS]
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=1e-8)
    assert len(set(np.round(expected, 9))) > 2
    assert float(schedule(STEPS[5])) == values[5]
    assert schedule(tf.constant(3, tf.int32)).dtype == tf.float32


@pytest.mark.parametrize(("name", "options"), CASES)
def test_configuration_is_plain_data_and_comes_back(name, options):
    schedule = build(name, options)
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(schedule)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is type(schedule) is schedules.SCHEDULES[name]
    assert restored.get_config() == schedule.get_config()
    assert float(restored(61)) == float(schedule(61))


def test_values_of_the_released_mnist_command():
    """`cycle_cos` from 0 to 0.6 under 0.4: at its maximum from r = arccos(-1/3) / pi = 0.608 on."""
    options = {"initial": 0, "final": "0.6", "maximum": "0.4"}
    radius = schedules.get("cycle_cos", 100 * 469, 469, **options)  # one cycle: the whole run
    by_epoch = [float(radius(469 * epoch)) for epoch in (0, 1, 50, 60, 61, 99, 100, 300)]
    grown = [0.3 * (1 - np.cos(np.pi * epoch / 100)) for epoch in (0, 1, 50, 60)]
    np.testing.assert_allclose(by_epoch, [*grown, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
    assert by_epoch[3] < 0.4 and np.arccos(-1 / 3) / np.pi == pytest.approx(0.608, abs=1e-3)
    straight = schedules.get("cycle_linear", 46_900, 469, unit="batch", **options)
    plateau = [float(straight(step)) for step in (31_266, 31_267, 31_268)]  # r = 2/3
    np.testing.assert_allclose(plateau, [0.4 * 31_266 / (46_900 / 1.5), 0.4, 0.4], rtol=1e-6)
    assert plateau[0] < float(np.float32(0.4)) == plateau[1]


@pytest.mark.parametrize("steps_per_epoch", [3, 7, 391, 469, 937])
def test_epochs_begin_at_their_first_step(steps_per_epoch):
    """In float32 arithmetic 391 * 1e5 / 391 and its neighbours fall into other epochs."""
    rise = schedules.Linear(0, 1, steps_per_epoch=steps_per_epoch)
    for epoch in (1, 7, 41, 1_000, 100_003):
        first = epoch * steps_per_epoch
        assert [float(rise(first + shift)) for shift in (-1, 0)] == [epoch - 1, epoch]


def test_a_cycle_ends_exactly_and_the_next_begins_exactly():
    line = schedules.CycleLinear(0.1, 0.7, (3, 7), steps_per_epoch=10, unit="batch")
    ends = [float(line(step)) for step in (0, 30, 69, 70, 700)]
    expected = [0.1, 0.1, 0.1 + 0.6 * 39 / 40, 0.7, 0.7]
    np.testing.assert_allclose(ends, expected, rtol=1e-6)
    assert (ends[0], ends[3]) == (np.float32(0.1), np.float32(0.7))


def test_a_leading_zero_among_the_checkpoints_changes_nothing():
    options = {"initial": 0.0, "final": 1.0}
    with_zero, without = (build("cycle_cos", {**options, "checkpoints": c}) for c in ((0, 5), (5,)))
    assert with_zero.get_config() == without.get_config()


def test_warm_up_of_bag_of_tricks():
    """`epsilon * (t + 1) / 15` for t < 15, then epsilon."""
    radius = schedules.get("warm_up", 110 * SPE, SPE, target="8/255", num_epochs=15)
    expected = [8 / 255 * min(t + 1, 15) / 15 for t in (0, 1, 13, 14, 15, 109)]
    values = [float(radius(t * SPE)) for t in (0, 1, 13, 14, 15, 109)]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert float(radius(SPE - 1)) == values[0]
    llr = schedules.get("piecewise", 10_000, 100, steps=(0, 500), values=(0, "8/255"))
    np.testing.assert_allclose([float(llr(s)) for s in (0, 250, 900)], [0, 4 / 255, 8 / 255])


def test_shared_checkpoints_go_to_the_schedules_that_take_them():
    radius = {"name": "cycle_linear", "initial": 0, "final": "12/255"}
    shared = schedules.with_checkpoints(radius, (4, 10))
    assert shared == {**radius, "checkpoints": (4, 10)}
    constant = {"name": "constant", "initial": 0.1}
    assert schedules.with_checkpoints(constant, (4, 10)) == constant
    with pytest.raises(ValueError, match=r"Two lists of checkpoints.*\[3\] and \[4, 10\]"):
        schedules.with_checkpoints({**radius, "checkpoints": (3,)}, (4, 10))


def test_shortened_schedules_are_the_long_ones_compressed():
    for name, options in CASES:
        short = schedules.scaled({"name": name, **options}, 1 / 4)
        short.pop("name")
        long, compressed = build(name, options), build(name, short)
        for t in (0.5, 3.5, 6, 9.5, 12.5):
            at = round(4 * t * SPE)
            np.testing.assert_allclose(compressed(at // 4), long(at), rtol=1e-5)
    assert schedules.scaled({"name": "step", "drop_epochs": (7, 9)}, 0.1)["drop_epochs"] == (7, 9)


def test_an_optimizer_reads_and_saves_them():
    rate = build("cycle_cos", {"initial": 0.1, "final": 0.0, "checkpoints": (2, 4)})
    optimizer = optimizers.SGD(rate)
    optimizer.build([keras.Variable([1.0])])
    optimizer.iterations.assign(SPE)
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    restored = optimizers.SGD.from_config(optimizer.get_config())
    assert stored_schedule(restored)["class_name"] == "CycleCosine"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"slope": 1}, "missing option of the schedule 'linear'.*received no initial"),
        ("linear", {"initial": 0, "slope": 1, "checkpoints": (1,)}, "received checkpoints"),
        ("linear", {"initial": "a", "slope": 1}, "expected a finite number.*received value='a'"),
        (
            "linear",
            {"initial": 0, "slope": 1, "unit": "step"},
            "Unknown unit.*received unit='step'",
        ),
        ("linear", {"initial": 0, "slope": 1, "minimum": 2, "maximum": 1}, "minimum <= maximum"),
        ("cycle_cos", {"initial": 0, "final": 1, "checkpoints": (5, 5)}, r"checkpoints=\[5, 5\]"),
        ("cycle_cos", {"initial": 0, "final": 1, "checkpoints": ()}, r"at least one.*checkpoints"),
        ("cycle_cos", {"initial": 0, "final": 1, "checkpoints": (-1, 5)}, "Invalid checkpoints"),
        ("cycle_jump", {"initial": 1, "power": 0, "drop_points": (0.5,)}, "a finite number > 0"),
        ("cycle_jump", {"initial": 1, "power": 1, "drop_points": (1.5,)}, r"drop_points=\[1.5\]"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        schedules.get(name, 13 * SPE, SPE, **options)
