"""The command line and Python evaluate in the same way unless they are told otherwise."""

import inspect

import numpy as np
import programs
import pytest
import tensorflow as tf
from absl import flags

import he_keras as he
from he_keras.evaluation import evaluate_corruptions, transfer_matrix, verify

pytestmark = pytest.mark.usefixtures("op_by_op")

#: Arguments that name what is evaluated, that the program has a sub-command for, or that it prints.
OWN = {"model", "examples", "threat", "output_dir", "merge", "protocol", "show_progress", "options"}
OWN |= {"training"}


def defaults(function):
    arguments = inspect.signature(function).parameters.items()
    return {name: each.default for name, each in arguments}


@pytest.fixture
def evaluate():
    """The program, with its flags defined."""
    with programs.loaded("evaluate") as program:
        yield program


def of_the_program():
    """What `he-keras evaluate` passes on without flags: of a flag, or of the configuration."""
    config = he.experiment.default_config().evaluation
    names = ("attacks", "mode", "batch_size", "checks", "panel", "shard")
    of_flags = {name: flags.FLAGS[name].default for name in names}
    of_config = {"attacks": config.attacks, "mode": config.mode}
    return of_flags | {name: of_flags[name] or value for name, value in of_config.items()}


def test_the_program_and_the_function_have_the_same_defaults(evaluate):
    in_python = defaults(he.evaluate_robustness)
    assert {name: in_python[name] for name in in_python.keys() - OWN} == of_the_program()
    assert he.experiment.default_config().evaluation.batch_size == in_python["batch_size"]


@pytest.mark.parametrize("function", [evaluate_corruptions, transfer_matrix, verify])
def test_the_other_functions_have_the_batch_size_of_the_flag(evaluate, function):
    assert defaults(function)["batch_size"] == evaluate.evaluation_flags.BATCH_SIZE.default


def test_attacks_run_as_by_the_flags(evaluate):
    """--logit_scale and --step_size name no default of their own."""
    evaluation_flags = evaluate.evaluation_flags
    attack = he.attacks.get("pgd-20", he.ThreatModel())
    assert attack.logit_scale == evaluation_flags.LOGIT_SCALE.default
    assert evaluation_flags.STEP_SIZE.default is None
    assert he.experiment.default_config().evaluation.step_size == ""


def test_each_row_stands_for_itself_unless_told_otherwise():
    """The second attack is run on what the first one broke, too."""
    images = np.array([[0.9, 0.1], [0.55, 0.5]], "float32")
    logits = lambda images: images @ tf.constant([[1.0, -1.0], [-1.0, 1.0]])  # noqa: E731
    threat = he.ThreatModel("linf", 0.1)
    report = he.evaluate_robustness(logits, (images, np.zeros(2, int)), threat, checks=False)
    assert [row.name for row in report.rows] == ["pgd-20", "adaptive-pgd-20", "cw-linf-20"]
    assert report.mode == "individual"
    assert [(row.num_attacked, row.num_broken) for row in report.rows] == [(2, 1)] * 3
