"""Nothing is computed twice: passes of every objective against what its mathematics needs.

The passes are counted while a compiled step runs, by a layer in the middle of the network. It
counts the examples that go forward, and those for which the gradient of its input is computed. It
also counts how often the gradient of its kernel is.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

pytestmark = pytest.mark.slow
THREAT = he.ThreatModel("linf", 0.1)
SHAPE = (4,)
K = 3
REPLAYS = 2
BATCH = 8
#: Passes of the batch, its input gradients, and weight gradients; see each objective's "Cost".
NEEDED = {
    "standard": ({}, (1, 1, 1)),
    "pgd_at": ({"num_steps": K}, (K + 1, K + 1, 1)),
    "alp": ({"num_steps": K}, (K + 2, K + 2, 2)),
    # The clean prediction that the adversary ascends from is computed once.
    "trades": ({"num_steps": K}, (K + 3, K + 2, 2)),
    "mart": ({"num_steps": K}, (K + 2, K + 2, 2)),
    "free_at": ({"num_replays": REPLAYS}, (REPLAYS, REPLAYS, REPLAYS)),
    "fast_at": ({}, (2, 2, 1)),
    "n_fgsm": ({}, (2, 2, 1)),
    "fast_adv_plus": ({}, (2, 2, 1)),
    # Three of ELLE's passes are one pass of three times the batch.
    "elle": ({}, (5, 5, 2)),
    "awp": ({"base": "pgd_at", "num_steps": K, "warm_up_steps": 0}, (K + 2, K + 2, 2)),
    "rat": ({"base": "pgd_at", "num_steps": K}, (K + 2, K + 2, 2)),
    # A double backward pass goes back through the input gradient, then through its forward pass.
    "grad_align": ({}, (4, 3 + 1 + 1, 1 + 1)),
    "llr": ({"num_steps": K, "warm_up_steps": 0}, (K + 1 + 2, K + 1 + 1 + 2, 2)),
}


class Passes:
    """Counts while graphs run."""

    def __init__(self):
        self.counts = collections.Counter()

    def noted(self, kind, tensor):
        """Returns the tensor; when it is computed, the pass is counted."""

        def add(number):
            self.counts[kind] += 1 if kind == "weight" else number / BATCH
            return np.int32(0)

        noted = tf.numpy_function(add, [tf.shape(tensor)[0]], tf.int32)
        with tf.control_dependencies([noted]):
            return tf.identity(tensor)

    def watched(self, kind, tensor, forward=None):
        """Returns the tensor; its gradient counts as `kind`, its value as `forward`."""

        @tf.custom_gradient
        def identity(values):
            values = tf.identity(values) if forward is None else self.noted(forward, values)
            return values, lambda upstream: self.noted(kind, upstream)

        return identity(tensor)


class CountingDense(keras.layers.Dense):
    """A dense layer that counts the passes through it."""

    def __init__(self, units, passes, **kwargs):
        super().__init__(units, **kwargs)
        self.passes = passes

    def call(self, inputs, training=None):
        inputs = self.passes.watched("input", inputs, forward="forward")
        kernel = self.passes.watched("weight", tf.convert_to_tensor(self.kernel))
        return tf.math.softplus(inputs @ kernel + self.bias)


def counted_step(name, options, wasteful=lambda objective: objective):
    """Returns the passes of one compiled training step."""
    passes = Passes()
    keras.utils.set_random_seed(0)
    network = keras.Sequential(
        [keras.Input(SHAPE), keras.layers.Dense(5, "softplus"), CountingDense(6, passes)]
    )
    objective = wasteful(objectives.get(name, THREAT, **options))
    model = he.HEAdversarialModel(network, he.CosineHead(3), objective, None)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    generator = np.random.default_rng(0)
    images = generator.uniform(0.2, 0.8, (BATCH, *SHAPE)).astype(np.float32)
    labels = generator.integers(0, 3, BATCH)
    # Also a second step, that any work once per run would not hide the work per step.
    model.fit(images, labels, batch_size=BATCH, verbose=0)
    passes.counts.clear()
    model.fit(images, labels, batch_size=BATCH, verbose=0)
    return tuple(passes.counts[kind] for kind in ("forward", "input", "weight"))


@pytest.mark.parametrize("name", objectives.names())
def test_a_step_runs_the_passes_that_its_mathematics_needs(name):
    options, needed = NEEDED[name]
    assert counted_step(name, options) == needed


def test_a_pass_too_many_is_seen():
    def wasteful(objective):
        craft = objective.craft

        def craft_twice(model, images, labels, seed=(0, 0)):
            return craft(model, craft(model, images, labels, seed), labels, seed)

        vars(objective)["craft"] = craft_twice
        return objective

    assert counted_step("fast_at", {}, wasteful) == (3, 3, 1)


def test_a_longer_attack_adds_one_forward_pass_and_one_input_gradient_a_step():
    few, many = (counted_step("trades", {"num_steps": steps}) for steps in (2, 7))
    assert np.subtract(many, few).tolist() == [5, 5, 0]
