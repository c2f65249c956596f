"""What every test starts from: two CPU devices, one seed, the default dtype policy."""

import gc
import os
import resource

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import keras
import pytest
import tensorflow as tf

# The same examples in every run, and as much time for each as a busy machine takes.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile("seeded")
#: The largest size of the process when garbage was last looked for.
_PEAK = pytest.StashKey[int]()


def pytest_configure(config):
    """Splits the CPU into two devices, which TensorFlow allows only before it first computes."""
    del config
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def pytest_collection_finish(session):
    """Looks for garbage less often: tracing makes so many objects that it took a quarter of it."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def pytest_runtest_teardown(item):
    """Looks for garbage when the process has grown: Python does not see how large a graph is."""
    grown_kilobytes = _peak_kilobytes() - item.session.stash.get(_PEAK, 0)
    if grown_kilobytes > 200_000:
        gc.collect()
        item.session.stash[_PEAK] = _peak_kilobytes()


def _peak_kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(autouse=True, scope="module")
def fixed_seed_of_the_file():
    """Seeds what the tests of a file share, before the first of them builds it."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Seeds Python, NumPy and Keras, so that no test depends on the tests before it."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def restored_dtype_policy():
    """Undoes a change of the global dtype policy, which would leak into the next test."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
