"""Two worker processes on this machine train as one device with the same global batch."""

import functools

import numpy as np
import pytest
import worker_program
from worker_processes import run_workers

pytestmark = pytest.mark.slow

PROGRAM = "tests/builders/worker_program.py"
TOLERANCE = 1e-5


@functools.cache
def of_two_workers(make_folder):
    """The numbers that each of two workers had at the end of every run, from one pair of them."""
    folder = make_folder("equal")
    for code, _, err in run_workers(PROGRAM, "equal", folder):
        assert code == 0, err
    return {
        name: [dict(np.load(folder / f"{name}-{worker}.npz")) for worker in range(2)]
        for name in worker_program.RUNS
    }


def lines_of(what, folder):
    """What each worker printed."""
    answers = run_workers(PROGRAM, what, folder)
    for code, _, err in answers:
        assert code == 0, err
    return [out.splitlines() for _, out, _ in answers]


@pytest.mark.parametrize("name", worker_program.RUNS)
def test_two_workers_train_as_one_device(name, tmp_path_factory):
    """Weights, statistics, and the loss and metrics of each step, epoch and validation."""
    several = of_two_workers(tmp_path_factory.mktemp)[name]
    single = worker_program.trained(name, run_eagerly=True)
    for numbers in several:
        assert sorted(numbers) == sorted(single)
        for key, value in single.items():
            np.testing.assert_allclose(
                numbers[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
    for key, value in several[0].items():
        np.testing.assert_array_equal(several[1][key], value, err_msg=key)
    assert "epochs: val_robust_accuracy" in single and "steps: loss" in single


def test_workers_agree(tmp_path):
    """On flags, contents, a refusal of the first one, and statistics that are not synchronised."""
    first, second = lines_of("agree", tmp_path)
    assert (first.pop(0), second.pop(0)) == ("2 0 1 True", "2 1 1 False")
    assert first == second
    flags, contents, refusal, difference, statistics = first
    assert flags == "[True, False] [3, 10]"
    assert contents == "[b'a', b'bcdefg'] [b'', b'']"
    assert "invalid literal" in refusal
    assert difference == (
        "Workers disagree about their numbers; expected one; received other ones in workers [1] "
        "than in worker 0"
    )
    assert statistics.startswith("[-0.") or statistics.startswith("[0.")
    assert [each.name for each in tmp_path.iterdir()] == ["by-0"]


def test_perturbations_of_all_workers_are_in_the_checkpoint(tmp_path):
    assert lines_of("resumed", tmp_path) == [["resumes"], ["resumes"]]
    with np.load(tmp_path / "whole.npz") as archive:
        noise = [archive["objective/noise_0"], archive["objective-1/noise_0"]]
    assert [each.shape for each in noise] == [(4, 4, 4, 1)] * 2
    assert np.any(noise[0] != noise[1])


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory):
    """What a stock Keras model says, and one with the first of both repairs."""
    return lines_of("plain", tmp_path_factory.mktemp("plain"))


def test_plain_keras_cannot_average_the_first_batch(plain_answers):
    """If this fails: see keras_repairs."""
    for lines in plain_answers:
        assert "PerReplica" in lines[0] and "unsupported type" in lines[0]


def test_plain_keras_cannot_average_scalar_logs(plain_answers):
    """If this fails: see keras_repairs."""
    for lines in plain_answers:
        assert "Invalid reduction dimension 0 for input with 0 dimensions" in lines[1]
