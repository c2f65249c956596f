"""Schedules against NumPy closed forms, at the steps where an off-by-one would show."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from he_keras import optimizers, schedules

STEPS_PER_EPOCH = 391
EVERY_SCHEDULE = {
    "step": {"initial": 0.1, "drop_epochs": [75, 90]},
    "triangular": {"peak": 0.2},
    "cosine": {"initial": 0.1, "warmup_epochs": 5, "final": 0.001},
    "piecewise": {"epochs": [0, 15, 30], "values": [0.0, 0.2, 0.0]},
    "cyclic_momentum": {},
}


def values_at(schedule, steps):
    """Returns the schedule's values at int64 steps, the type of an optimizer's counter."""
    return np.array([float(schedule(tf.constant(step, tf.int64))) for step in steps])


def around(*steps):
    return sorted({max(step + shift, 0) for step in steps for shift in (-1, 0, 1)})


def test_drops_take_effect_at_the_first_batch_of_their_epoch():
    drops = [75 * STEPS_PER_EPOCH, 90 * STEPS_PER_EPOCH]
    rate = schedules.get("step", 100 * 391, STEPS_PER_EPOCH, initial=0.1, drop_epochs=(75, 90))
    steps = around(0, *drops, 100 * STEPS_PER_EPOCH)
    expected = [0.1 * 0.1 ** ((step >= drops[0]) + (step >= drops[1])) for step in steps]
    np.testing.assert_allclose(values_at(rate, steps), expected, rtol=1e-6)


def test_boundaries_may_be_given_in_steps_and_the_factor_chosen():
    rate = schedules.get("step", 80, 10, initial=0.4, boundaries=[40, 60], drop_factor=0.5)
    np.testing.assert_allclose(values_at(rate, [39, 40, 59, 60]), [0.4, 0.2, 0.2, 0.1], rtol=1e-6)


def test_piecewise_constant_is_kerass_own_class_shifted_by_one_step():
    rate = schedules.piecewise_constant([3, 5], [1.0, 2.0, 3.0])
    assert type(rate) is keras.optimizers.schedules.PiecewiseConstantDecay
    np.testing.assert_array_equal(values_at(rate, range(7)), [1, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("peak_fraction", [0.5, 0.4, 1 / 3])
def test_triangular_is_np_interp(peak_fraction):
    total = 78_200
    rate = schedules.triangular(0.2, total, peak_fraction, start=0.01, end=0.001)
    steps = [*around(0, round(peak_fraction * total), total), 1_000, 40_000, 70_001, 10**6]
    expected = np.interp(steps, [0, peak_fraction * total, total], [0.01, 0.2, 0.001])
    np.testing.assert_allclose(values_at(rate, steps), expected, rtol=1e-6, atol=2e-8)


def test_triangular_starts_and_ends_at_exactly_zero():
    rate = schedules.triangular(0.2, 11_730)
    assert values_at(rate, [0, 11_730, 20_000]).tolist() == [0.0, 0.0, 0.0]
    assert np.all(values_at(rate, range(11_700, 11_730)) > 0)


def test_momentum_mirrors_the_learning_rate():
    total = 30 * STEPS_PER_EPOCH
    rate = schedules.get("triangular", total, STEPS_PER_EPOCH, peak=0.2)
    momentum = schedules.get("cyclic_momentum", total, STEPS_PER_EPOCH)
    steps = [0, 1, 1_000, total // 2, 9_000, total - 1, total]
    # PyTorch's CyclicLR: max_momentum - (max_momentum - base_momentum) * position in the cycle.
    expected = 0.9 - (0.9 - 0.8) * values_at(rate, steps) / 0.2
    np.testing.assert_allclose(values_at(momentum, steps), expected, rtol=1e-6)
    np.testing.assert_allclose(values_at(momentum, [total // 2]), [0.8], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 500])
def test_cosine_closed_form(warmup):
    initial, final, total = 0.1, 0.002, 5_000
    rate = schedules.cosine(initial, total, warmup, final)
    steps = np.array([*around(0, warmup, total), 250, 2_750, 4_000, 9_999])
    position = np.clip((steps - warmup) / (total - warmup), 0, 1)
    falling = final + 0.5 * (initial - final) * (1 + np.cos(np.pi * position))
    expected = np.where(steps < warmup, initial * steps / max(warmup, 1), falling)
    np.testing.assert_allclose(values_at(rate, steps), expected, rtol=1e-4, atol=1e-8)


def test_piecewise_linear_keeps_its_end_values_and_takes_fractional_points():
    rate = schedules.PiecewiseLinear([0.5, 2.5, 10], [0.0, 1.0, 0.25])
    steps = range(13)
    expected = np.interp(steps, [0.5, 2.5, 10], [0.0, 1.0, 0.25])
    np.testing.assert_allclose(values_at(rate, steps), expected, rtol=1e-6)


def test_large_step_counts_stay_exact():
    total = 2**24
    rate = schedules.triangular(1.0, total)
    steps = around(total // 2, total)[:-1]
    expected = np.interp(steps, [0, total / 2, total], [0, 1, 0])
    np.testing.assert_allclose(values_at(rate, steps), expected, rtol=1e-6)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_config_round_trip_gives_the_same_values(name):
    rate = schedules.get(name, 30 * STEPS_PER_EPOCH, STEPS_PER_EPOCH, **EVERY_SCHEDULE[name])
    serialized = keras.saving.serialize_keras_object(rate)
    restored = keras.saving.deserialize_keras_object(serialized)
    steps = [0, 1, 700, 5_865, 11_000, 40_000]
    assert type(restored) is type(rate)
    np.testing.assert_array_equal(values_at(restored, steps), values_at(rate, steps))


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_graph_equals_eager_without_retracing(name):
    rate = schedules.get(name, 30 * STEPS_PER_EPOCH, STEPS_PER_EPOCH, **EVERY_SCHEDULE[name])
    traces = []

    @tf.function
    def compiled(step):
        traces.append(step)
        return rate(step)

    steps = [0, 3, 700, 5_865, 11_730]
    graph = [float(compiled(tf.constant(step, tf.int64))) for step in steps]
    np.testing.assert_allclose(graph, values_at(rate, steps), rtol=1e-6)
    assert len(traces) == 1


def test_an_optimizer_reads_the_schedule_at_its_own_step():
    weight = keras.Variable([1.0])
    optimizer = optimizers.SGD(schedules.PiecewiseLinear([0, 2], [0.0, 0.2]), momentum=0.0)
    seen = []
    for _ in range(4):
        optimizer.apply([tf.ones(1)], [weight])
        seen.append(float(weight[0]))
    np.testing.assert_allclose(seen, [1.0, 0.9, 0.7, 0.5], rtol=1e-6)


def test_constant_is_a_number_that_an_optimizer_lets_change():
    rate = schedules.get("constant", 100, 10, initial=1)
    optimizer = optimizers.SGD(rate)
    optimizer.learning_rate = 0.5
    assert isinstance(rate, float)
    assert float(optimizer.learning_rate) == 0.5


def test_fractions_of_an_epoch_are_rounded_to_steps():
    rate = schedules.get("piecewise", 100, 10, epochs=(0, 0.25, 1), values=(0.0, 1.0, 0.0))
    assert rate.steps == [0.0, 2.0, 10.0]


def test_unknown_name_lists_the_names():
    expected = ", ".join(sorted(schedules.SCHEDULES))
    message = f"expected one of {expected}; received 'line'; did you mean 'linear'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        schedules.get("line", 100, 10)


def test_unknown_option_lists_the_options():
    message = r"option .* 'step'; expected some of initial, boundaries, drop_factor, drop_epochs; "
    with pytest.raises(ValueError, match=message + "received milestones"):
        schedules.get("step", 100, 10, initial=0.1, milestones=[5])
    with pytest.raises(ValueError, match="received drop_epochs"):
        schedules.get("step", 100, 10, initial=0.1, boundaries=[5], drop_epochs=[1])
    with pytest.raises(ValueError, match="received unit"):
        schedules.get("piecewise", 100, 10, epochs=[0, 1], values=[0.0, 1.0], unit=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: schedules.PiecewiseLinear([0, 0], [1, 2]), r"increasing .* steps=\[0, 0\]"),
        (lambda: schedules.PiecewiseLinear([5], [1]), r"two or more .* steps=\[5\]"),
        (lambda: schedules.PiecewiseLinear([0, 5], [1]), r"expected 2, .* values=\[1\]"),
        (lambda: schedules.piecewise_constant([], [1.0]), r"from 1 on; .* boundaries=\[\]"),
        (lambda: schedules.piecewise_constant([0], [1.0, 2.0]), r"boundaries=\[0\]"),
        (lambda: schedules.piecewise_constant([5, 5], [1, 2, 3]), r"boundaries=\[5, 5\]"),
        (lambda: schedules.piecewise_constant([5], [1.0]), r"boundaries, 2; .* values=\[1.0\]"),
        (lambda: schedules.triangular(0.2, 100, peak_fraction=1.0), "peak_fraction=1.0"),
        (lambda: schedules.triangular(0.2, 0), "total_steps=0"),
        (lambda: schedules.cosine(0.1, 100, warmup_steps=100), "warmup_steps=100"),
        (lambda: schedules.cosine(0.0, 100), "initial=0.0"),
        (lambda: schedules.get("constant", 100, 0, initial=0.1), "steps_per_epoch=0"),
    ],
)
def test_refuses_invalid_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_schedule_that_no_file_could_hold_is_told(monkeypatch):
    class Mine(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, initial):
            self.initial = initial

    known = schedules.registry.SCHEDULES.copy()
    monkeypatch.setattr(schedules.registry, "SCHEDULES", known)
    known["mine"] = Mine
    with pytest.raises(TypeError, match="'mine' cannot be saved; expected get_config()"):
        schedules.get("mine", 10, 5, initial=0.1)
