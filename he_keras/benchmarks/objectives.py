"""A training step of LLR compared with the sum of the passes it consists of.

With f a forward pass, b an input gradient and B a full backward pass, a step of K search steps is
predicted at

    (K + 1) (f + b)   the clean pass that the search starts from, and the search
    + 2 f + b         the clean pass, its input gradient, and the pass at the point found
    + 3 B             through each of these three: the double backward counts as the backward pass
                      of a second network, that of the input gradient

with f, f + b and f + B measured on the same network and batch: f and f + b in inference mode, as
the search runs them, f + B as a step of standard training. Rounds are interleaved and the best time
of each counts.
"""

import time
from typing import NamedTuple

import numpy as np


class Cost(NamedTuple):
    """Seconds of a step, and of the passes that predict it."""

    num_steps: int
    forward: float
    forward_backward: float
    training: float
    step: float

    @property
    def predicted(self) -> float:
        """Seconds that the passes of a step take together."""
        input_gradient = self.forward_backward - self.forward
        backward = self.training - self.forward
        search = (self.num_steps + 1) * self.forward_backward
        return search + 2 * self.forward + input_gradient + 3 * backward

    @property
    def ratio(self) -> float:
        """The step's seconds over those predicted."""
        return self.step / self.predicted


def measure(
    network: str = "preact-resnet-small",
    batch_size: int = 64,
    num_steps: tuple[int, ...] = (2, 10),
    statistics: tuple[str, ...] = ("batch", "moving"),
    rounds: int = 5,
) -> str:
    """Returns a table of steps and predictions, one line for each setting.

    Args:
        network: a network for CIFAR-10's images, built with softplus.
        batch_size: examples in a step.
        num_steps: search steps K.
        statistics: settings of `LLR`.
        rounds: interleaved rounds.
    """
    lines = [
        f"{network}, batch {batch_size}, best of {rounds} interleaved rounds, milliseconds",
        f"{'statistics':<12}{'K':>3}{'f':>9}{'f + b':>9}{'f + B':>9}{'step':>10}"
        f"{'predicted':>11}{'ratio':>7}",
    ]
    for kind in statistics:
        for steps in num_steps:
            lines.append(_line(kind, measure_one(network, batch_size, steps, kind, rounds)))
    return "\n".join(lines)


def measure_one(
    network: str, batch_size: int, num_steps: int, statistics: str, rounds: int
) -> Cost:
    """Times one setting of LLR and its passes."""
    import he_keras as he

    threat = he.ThreatModel("linf", "8/255")
    llr = he.objectives.get(
        "llr", threat, num_steps=num_steps, statistics=statistics, warm_up_steps=0
    )
    model = _model(network, llr)
    images, labels = _batch(batch_size)
    work = {
        **_passes(model, images, labels),
        "training": _stepper(_model(network, he.objectives.Standard()), images, labels),
        "step": _stepper(model, images, labels),
    }
    best = dict.fromkeys(work, np.inf)
    for run in work.values():
        run()
    for _ in range(rounds):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return Cost(num_steps, **best)


def _model(network: str, objective):
    import keras

    import he_keras as he

    keras.utils.set_random_seed(0)
    body = he.networks.get(network, (32, 32, 3), activation="softplus")
    model = he.HEAdversarialModel(body, keras.layers.Dense(10), objective, None)
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return model


def _batch(batch_size: int):
    import tensorflow as tf

    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (batch_size, 32, 32, 3)).astype("float32")
    return tf.constant(images), tf.constant(generator.integers(0, 10, batch_size), tf.int32)


def _passes(model, images, labels) -> dict:
    """The passes of the search, compiled."""
    import tensorflow as tf

    import he_keras as he

    @tf.function
    def forward():
        return he.losses.cross_entropy(model(images, training=False), labels)

    @tf.function
    def forward_backward():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(images)
            loss = he.losses.cross_entropy(model(images, training=False), labels)
        return tape.gradient(loss, images)

    return {
        "forward": lambda: forward().numpy(),
        "forward_backward": lambda: forward_backward().numpy(),
    }


def _stepper(model, images, labels):
    """A training step without the loop of `fit` around it."""
    import tensorflow as tf

    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda: model.train_step((images, labels)))
    return lambda: tf.nest.map_structure(np.asarray, step())


def _line(statistics: str, cost: Cost) -> str:
    seconds = (cost.forward, cost.forward_backward, cost.training)
    shown = "".join(f"{1000 * each:>9.1f}" for each in seconds)
    return (
        f"{statistics:<12}{cost.num_steps:>3}{shown}{1000 * cost.step:>10.1f}"
        f"{1000 * cost.predicted:>11.1f}{cost.ratio:>7.2f}"
    )
