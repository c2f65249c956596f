"""What is left of an evaluation, by hand: a clock and a counter that the tests move."""

import pytest

import he_keras as he
from he_keras.attacks.framework.pass_counter import Passes
from he_keras.evaluation.run.progress import Forecast, StageCost, Work, stages_of


class World:
    """A clock and a counter; `run` lets some examples pass so often, for so long each time."""

    def __init__(self, *most):
        self.now, self.passes = 100.0, Passes(7, 700)
        self.stages = [StageCost(f"attack {each}", each, True) for each in most]
        self.forecast = Forecast(self.stages, lambda: self.passes, lambda: self.now)

    def run(self, images, times, seconds):
        for _ in range(times):
            self.now += seconds
            self.passes = Passes(self.passes.batches + 1, self.passes.images + images)
            self.forecast.look()


@pytest.fixture
def world():
    world = World(100, 200)
    world.forecast.begin(0, rows=10, batch_size=50)
    return world


def test_nobody_knows_before_the_first_passes(world):
    assert world.forecast.at_work is None
    world.now += 30
    world.forecast.look()
    assert world.forecast.seconds_left([]) is None


def test_a_batch_takes_what_its_examples_at_work_have_left(world):
    world.now += 20  # compilation
    world.run(images=10, times=1, seconds=0)
    world.run(images=10, times=40, seconds=1.0)
    assert world.forecast.at_work == 10
    # 41 of 100 passes are done, at 40 seconds for 410 passes.
    assert world.forecast.seconds_left([]) == pytest.approx(59 * 10 * 40 / 410)
    world.run(images=2, times=9, seconds=0.2)
    assert world.forecast.at_work == 2
    assert world.forecast.seconds_left([]) == pytest.approx(50 * 2 * 41.8 / 428)


def test_what_follows_is_what_holds_out(world):
    world.run(images=10, times=50, seconds=1.0)
    world.run(images=5, times=50, seconds=0.5)
    world.forecast.end(num_held=5)
    left = world.forecast.seconds_left
    # The second attack has not run: an example is expected to take its 200 passes.
    per_pass = (49 + 25) / 750
    assert left([Work(1, 10, (0,))]) == pytest.approx(10 * 0.5 * 200 * per_pass + 1.0)
    # Another batch of the first: 75 passes each.
    assert left([Work(0, 10)]) == pytest.approx(10 * 75 * per_pass)


def test_compilation_is_expected_once_for_each_attack(world):
    world.now += 20
    world.run(images=10, times=1, seconds=0)
    world.run(images=10, times=99, seconds=1.0)
    world.forecast.end(num_held=10)
    per_pass = 99 / 1000
    work = [Work(1, 10, (0,)), Work(1, 10, (0,))]
    assert world.forecast.seconds_left(work) == pytest.approx(4000 * per_pass + 20)
    world.forecast.begin(1, 10, 50)
    world.run(images=10, times=200, seconds=1.0)
    world.forecast.end(num_held=10)
    world.forecast.begin(1, 10, 50)
    # The second batch of an attack waits for nothing.
    assert world.forecast.seconds_left([]) == pytest.approx(2000 * 199 / 2000)


def test_a_loop_that_is_compiled_after_the_first_pass_does_not_count_as_slow():
    world = World(100, 100)
    world.forecast.begin(0, rows=10, batch_size=50)
    world.run(images=10, times=100, seconds=0.1)
    world.forecast.end(num_held=10)
    world.forecast.begin(1, rows=10, batch_size=50)
    world.run(images=10, times=1, seconds=0)
    left = world.forecast.seconds_left
    # While the second attack compiles, it is expected to be as fast as the first.
    world.now += 60
    assert left([]) == pytest.approx(99 * 0.1, rel=0.02)
    world.run(images=10, times=50, seconds=0.1)
    assert left([]) == pytest.approx(49 * 0.1, rel=0.05)
    world.forecast.end(num_held=10)
    assert world.forecast.stages[1].compiling == pytest.approx(60.1)
    assert world.forecast.stages[1].seconds == pytest.approx(49 * 0.1)


def test_recorded_batches_tell_who_holds_out_but_not_how_long_it_takes(world):
    world.forecast.end(num_held=4, is_recorded=True)
    assert world.forecast.share_held(0) == pytest.approx(0.4)
    assert world.forecast.passes_per_example(0) == 100
    assert world.forecast.seconds_left([Work(0, 10)]) is None


def test_small_calls_and_several_points_of_an_example():
    world = World(100)
    # 100 examples, 50 at a time: each image still passes 100 times.
    world.forecast.begin(0, rows=100, batch_size=50)
    world.run(images=50, times=100, seconds=1.0)
    assert world.forecast.seconds_left([]) == pytest.approx(100 * 50 * 99 / 5000)
    # Each call passes eight points of each of ten examples.
    world = World(80)
    world.forecast.begin(0, rows=10, batch_size=50)
    world.run(images=80, times=5, seconds=1.0)
    assert world.forecast.seconds_left([]) == pytest.approx(5 * 80 * 4 / 400)
    assert world.forecast.at_work == 10


def test_attacks_that_nobody_watches_count_for_themselves(world):
    world.now += 50
    world.forecast.end(num_held=10, passes=1000.0)
    assert world.forecast.seconds_left([Work(0, 10)]) == pytest.approx(50)


def test_the_stages_of_an_ensemble_have_their_names():
    threat = he.ThreatModel("linf", 0.1)
    attacks = [he.attacks.get(name, threat) for name in ("pgd-10", "fast")]
    stages = stages_of(attacks, num_classes=10)
    assert [stage.name for stage in stages] == [
        "pgd-10",
        "fast, apgd-cw (1 of 3)",
        "fast, apgd-nearest (2 of 3)",
        "fast, square (3 of 3)",
    ]
    assert sum(stage.most for stage in stages[1:]) == attacks[1].most_passes(10)
    assert [stage.uses_gradient for stage in stages] == [True, True, True, False]
