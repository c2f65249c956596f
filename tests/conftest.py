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
