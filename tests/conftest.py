"""What every test starts from: two CPU devices, one seed, the default dtype policy."""

import collections
import ctypes
import gc
import os
import pathlib
import resource
import signal
import unittest.mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import keras
import pytest
import tensorflow as tf

# The same examples in every run, and as much time for each as a busy machine takes.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile("seeded")
#: The size of the process after garbage was last looked for.
_RESIDENT = pytest.StashKey[int]()


def pytest_configure(config):
    """Splits the CPU into two devices, which TensorFlow allows only before it first computes."""
    del config
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts what runs in the background so, and tests start programs to interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the other cases of a test as slow where `fast_cases` says which of them are fast."""
    cases = collections.defaultdict(dict)
    for item in items:
        if item.get_closest_marker("fast_cases"):
            cases[item.nodeid.partition("[")[0]][item.callspec.id] = item
    for test, named in cases.items():
        fast = next(iter(named.values())).get_closest_marker("fast_cases").args
        unknown = sorted(set(fast) - set(named))
        # Where one case is asked for, the others are not collected.
        if unknown and not any("::" in asked for asked in config.args):
            raise pytest.UsageError(
                f"{test}: fast_cases names {', '.join(unknown)}; the cases are {', '.join(named)}"
            )
        for case, item in named.items():
            if case not in fast:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session):
    """Looks for garbage less often: tracing makes so many objects that it took a quarter of it."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def pytest_runtest_teardown(item):
    """Looks for garbage when the process has grown: Python does not see how large a graph is."""
    grown_megabytes = _resident_megabytes() - item.session.stash.get(_RESIDENT, 0)
    if grown_megabytes > 200:
        gc.collect()
        _return_freed_memory()
        item.session.stash[_RESIDENT] = _resident_megabytes()


def _resident_megabytes():
    sizes = pathlib.Path("/proc/self/statm")
    if not sizes.exists():
        # Not Linux: the largest size so far.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return int(sizes.read_text().split()[1]) * resource.getpagesize() // 2**20


def _return_freed_memory():
    """Has the C library return what it keeps: workers grew to 13 GB of freed tensors and graphs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True, scope="module")
def fixed_seed_of_the_file():
    """Seeds what the tests of a file share, before the first of them builds it."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def fixed_seed(request):
    """Seeds Python, NumPy and Keras, so that no test depends on the tests before it.

    A seed of TensorFlow empties its cache of kernels, which cost a seventh of the fast part.
    So TensorFlow is only seeded again for tests of a file that draws by `tf.random`.
    """
    if "tf.random." in request.path.read_text(encoding="utf-8"):
        keras.utils.set_random_seed(0)
        return
    with unittest.mock.patch.object(tf.random, "set_seed"):
        keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def restored_dtype_policy():
    """Undoes a change of the global dtype policy, which would leak into the next test."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture(scope="module")
def op_by_op():
    """Runs attacks operation by operation: a few steps on a small model take less than a trace.

    `tests/attacks/test_attack_properties.py` compiles every attack, and the tests of compilation
    compare the two ways.
    """
    from he_keras.attacks import Attack

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Attack, "runs_in_graph", False)
        yield
