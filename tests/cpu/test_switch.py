"""When CPU tuning is taken: the switch, the environment, and where the computation runs."""

import functools
import runpy

import keras
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import cpu
from he_keras.cpu import switch
from he_keras.cpu.switch import applies, in_use, runs_on_cpu


def read_environment():
    """As a new process does, which runs the module for the first time."""
    return bool(runpy.run_path(switch.__file__)["is_enabled"]())


def is_plain(function):
    """Whether this is the network itself, in one of its modes."""
    return isinstance(function, functools.partial) and isinstance(function.func, keras.Model)


@pytest.fixture(scope="module")
def network():
    return he.networks.PreActResNet((8, 8, 1), (4, 8), (1, 1))


def in_graph(function, device=None):
    """Calls a function while a graph is made, perhaps within a device scope."""
    found = []

    @tf.function
    def traced():
        with tf.device(device):
            found.append(function())

    # Only traced: a machine without the device could not run it.
    traced.get_concrete_function()
    return found[0]


def test_a_device_scope_decides():
    assert runs_on_cpu()
    assert in_graph(runs_on_cpu)
    assert in_graph(runs_on_cpu, "CPU:0")
    assert not in_graph(runs_on_cpu, "GPU:0")
    assert not in_graph(runs_on_cpu, "TPU:0")


@pytest.mark.parametrize("accelerator", ["GPU", "TPU"])
def test_without_a_scope_a_graph_goes_to_the_accelerator(monkeypatch, accelerator):
    devices = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: [kind] if kind == accelerator else devices(kind),
    )
    assert not in_graph(runs_on_cpu)
    assert in_graph(runs_on_cpu, "CPU:0")


def test_a_replica_on_a_cpu_runs_there():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    found = tf.function(lambda: strategy.run(lambda: tf.constant(runs_on_cpu())))()
    assert bool(found)


def test_other_devices_run_the_network_as_keras_does(network):
    for make in (cpu.inference_function, cpu.training_function):
        assert not is_plain(make(network))
        assert is_plain(in_graph(lambda make=make: make(network), "GPU:0"))


def test_the_switch_turns_everything_off(network):
    try:
        cpu.set_enabled(False)
        assert not cpu.is_enabled() and in_use() == frozenset()
        assert is_plain(cpu.inference_function(network))
        assert is_plain(cpu.training_function(network))
        assert cpu.batch_function(len, network) is len
    finally:
        cpu.set_enabled(True)
    assert cpu.is_enabled() and in_use() == frozenset(cpu.TRICKS)


def test_one_trick_can_be_turned_off():
    with cpu.disabled("half_batches"):
        assert not applies("half_batches") and applies("folded_norms")
        with cpu.disabled():
            assert not applies("folded_norms")
        assert applies("folded_norms")
    assert applies("half_batches")
    with pytest.raises(ValueError, match="expected some of .*; received \\['sorcery'\\]"):
        cpu.disabled("sorcery").__enter__()


def test_the_environment_turns_it_off(monkeypatch):
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("HE_KERAS_CPU_TUNING", value)
        assert read_environment() is expected
    monkeypatch.setenv("HE_KERAS_CPU_TUNING", "2")
    with pytest.raises(ValueError, match="expected"):
        read_environment()


@pytest.mark.slow
def test_a_compiled_attack_follows_the_switch(network):
    attack = he.attacks.PGD(he.ThreatModel("linf", 0.1), num_steps=1)
    model = he.HEAdversarialModel(network, keras.layers.Dense(3))
    images, labels = tf.zeros([2, 8, 8, 1]).numpy(), [0, 1]
    attack(model, images, labels)
    with_tuning = attack._compiled
    with cpu.disabled():
        attack(model, images, labels)
    assert attack._compiled is not with_tuning
