"""Passes that are counted while an attack runs."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks.framework.pass_counter import COUNTER, PassCounter

THREAT = he.ThreatModel("linf", 1e-4)
IMAGES = np.random.default_rng(0).uniform(size=(6, 2, 2, 1)).astype("float32")
LABELS = IMAGES.reshape(6, 4).argmax(axis=1)


def model(images):
    return 9.0 * tf.reshape(images, [-1, 4])


@pytest.mark.fast_cases("pgd-4")
@pytest.mark.parametrize("name", ["pgd-4", "square-7", "apgd-ce-5", "deepfool"])
def test_what_is_counted_is_what_the_result_says(name):
    attack = he.attacks.get(name, THREAT)
    attack(model, IMAGES, LABELS)
    before = COUNTER.passes()
    result = attack(model, IMAGES, LABELS)
    spent = COUNTER.passes().images - before.images
    assert spent == (result.forward_passes + result.backward_passes).sum()


def test_the_count_is_read_while_a_loop_runs():
    """The model waits in the middle of an attack until the count was read."""
    seen, reached, was_read = [], threading.Event(), threading.Event()
    calls = []

    def wait(values):
        calls.append(1)
        if len(calls) > 20:
            reached.set()
            was_read.wait(30)
        return values

    def slow(images):
        return tf.ensure_shape(tf.numpy_function(wait, [model(images)], tf.float32), [None, 4])

    attack = he.attacks.get("square-40", THREAT)
    before = COUNTER.passes().images
    thread = threading.Thread(target=attack, args=(slow, IMAGES, LABELS))
    thread.start()
    assert reached.wait(60)
    seen.append(COUNTER.passes().images - before)
    was_read.set()
    thread.join()
    assert 0 < seen[0] < COUNTER.passes().images - before


def test_a_training_step_counts_nothing():
    before = COUNTER.passes()
    attack = he.attacks.get("pgd-2", THREAT)
    victim = he.attacks.Victim(model)
    attack.perturb(victim, tf.constant(IMAGES), tf.constant(LABELS), tf.zeros((6, 2), tf.int32))
    assert COUNTER.passes() == before


def test_under_xla_and_on_replicas_nothing_is_counted():
    counter = PassCounter()
    values = tf.zeros((3, 2))
    compiled = tf.function(counter.watched, jit_compile=True)
    np.testing.assert_array_equal(compiled(values), values)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        counter.watched(values)
    assert counter.passes() == (0, 0)
