"""What every test starts from: two CPU devices, one seed, the default dtype policy."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
import tensorflow as tf


def pytest_configure(config):
    """Splits the CPU into two devices, which TensorFlow allows only before it first computes."""
    del config
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def pytest_addoption(parser):
    """Adds --part: CI runs another part of the slow tests for each commit."""
    parser.addoption("--part", help="K/N: only the K-th of N parts of the test files, e.g. 1/4")


def pytest_collection_modifyitems(config, items):
    """Leaves out the files of the other parts."""
    part = config.getoption("--part")
    if part is None:
        return
    kept = files_of_part({item.path.name for item in items}, part)
    config.hook.pytest_deselected(items=[item for item in items if item.path.name not in kept])
    items[:] = [item for item in items if item.path.name in kept]


def files_of_part(names, part: str) -> set[str]:
    """Returns every N-th of the sorted names, from the K-th on, of a part "K/N"."""
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"Invalid --part; expected K/N with 1 <= K <= N; received {part}")
    return set(sorted(names)[int(number) - 1 :: int(count)])


@pytest.fixture(autouse=True)
def fixed_seed():
    """Seeds Python, NumPy and Keras, so that no test depends on the tests before it."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def restored_dtype_policy():
    """Undoes a change of the global dtype policy, which would leak into the next test."""
    before = keras.config.dtype_policy()
    yield
    if keras.config.dtype_policy() != before:
        keras.backend.clear_session()
        keras.config.set_dtype_policy(before)
