"""What the paper's CIFAR-10 and ImageNet tables cost: operations counted, hours by arithmetic.

The operations of a forward pass are those of the network's convolutions, two for each multiply-add,
counted from their shapes. A pass back to the images costs as much, one to images and weights twice
as much. An epoch is every training image once. Nothing else is counted: the hours are what the
convolutions take at a stated speed.

Two speeds stand in the table. A training pass of PreActResNet-18 reaches the first on this machine,
and --tflops assumes the second for a device that is not here.
"""

from typing import NamedTuple

import numpy as np

from he_keras.benchmarks.convolutions import (
    PassCounts,
    best_seconds,
    convolutions_of,
    pass_counts,
)
from he_keras.experiment import catalog

_MEASURED_NETWORK = "preact-resnet-18"
_HOUR = 3600.0
_MULTIPLY_ADD = 2
_TRAINING_IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "imagenet2012": 1_281_167,
}
#: Paper table, row (with any head: it changes nothing here), configuration.
ROWS = (
    ("2 and 10", "PGD-AT", "cifar10_pgd_at_he"),
    ("2 and 10", "ALP", "cifar10_alp_he"),
    ("2, 9 and 10", "TRADES", "cifar10_trades_he"),
    ("3", "FastAT", "cifar10_fast_at_he"),
    ("3", "FreeAT", "cifar10_free_at_he"),
    ("4", "ResNet-50", "imagenet_free_at_resnet_50_he"),
    ("4", "ResNet-152", "imagenet_free_at_resnet_152_he"),
    ("4", "WRN-50-2", "imagenet_free_at_wide_resnet_50_2_he"),
    ("4", "WRN-101-2", "imagenet_free_at_wide_resnet_101_2_he"),
)


class Cost(NamedTuple):
    """The counts of one table row."""

    table: str
    row: str
    network: str
    multiply_adds: int
    epochs: int
    examples: int
    steps: int
    passes: PassCounts

    @property
    def forward_equivalents(self) -> int:
        """Passes for one image and epoch, in units of a forward pass."""
        return sum(self.passes)

    @property
    def operations(self) -> float:
        """Floating-point operations of the whole training."""
        images = float(self.epochs) * self.examples
        return images * self.forward_equivalents * _MULTIPLY_ADD * self.multiply_adds

    def hours(self, operations_per_second: float) -> float:
        """How long the training takes at a speed."""
        return self.operations / operations_per_second / _HOUR


def table(tflops: float, batch_size: int, rounds: int) -> str:
    """Returns the table.

    Args:
        tflops: the assumed speed of one device, in 10^12 operations a second.
        batch_size: of the measurement.
        rounds: of the measurement; the best counts.
    """
    costs = [cost_of(*row) for row in ROWS]
    speed = measured_speed(batch_size, rounds)
    per_image = (1 + 2) * _MULTIPLY_ADD * multiply_adds(_MEASURED_NETWORK, (32, 32, 3))
    lines = [
        f"measured here: training pass of {_MEASURED_NETWORK}, batch {batch_size}, best of "
        f"{rounds}: {speed / per_image:.1f} images/s, {speed / 1e9:.0f} GFLOP/s",
        f"assumed: {tflops:g} TFLOP/s sustained by a device; 8 devices 8 times as much",
        f"{'table':<13}{'row':<12}{'network':<22}{'GMAC':>7}{'epochs':>7}{'steps':>9}{'passes':>8}"
        f"{'PFLOP':>9}{'h here':>9}{'h, 1':>8}{'h, 8':>8}",
    ]
    return "\n".join([*lines, *(_line(each, speed, tflops * 1e12) for each in costs)])


def _line(cost: Cost, speed: float, assumed: float) -> str:
    return (
        f"{cost.table:<13}{cost.row:<12}{cost.network:<22}{cost.multiply_adds / 1e9:>7.2f}"
        f"{cost.epochs:>7}{cost.steps:>9}{cost.forward_equivalents:>8}"
        f"{cost.operations / 1e15:>9.0f}{cost.hours(speed):>9.0f}{cost.hours(assumed):>8.2f}"
        f"{cost.hours(8 * assumed):>8.2f}"
    )


def cost_of(paper_table: str, row: str, config_name: str) -> Cost:
    """Counts one row of a paper's table by its configuration.

    Example:
        >>> cost = cost_of("3", "FastAT", "cifar10_fast_at_he")
        >>> cost.passes, cost.steps, round(cost.multiply_adds / 1e9, 2)
        (PassCounts(forward=2, input_gradient=2, weight_gradient=1), 11490, 0.56)
    """
    config = catalog.get_config(config_name)
    network, shape = config.network.name, tuple(config.network.input_shape)
    epochs, examples = config.train.epochs, training_images(config)
    steps = epochs * -(-examples // config.train.batch_size)
    counted = multiply_adds(network, shape, **config.network.options)
    passes = passes_of(config.objective.to_dict())
    return Cost(paper_table, row, network, counted, epochs, examples, steps, passes)


def training_images(config) -> int:
    """Returns how many images of its data set a configuration trains on, by what is published.

    Example:
        >>> from he_keras.experiment import catalog
        >>> training_images(catalog.get_config("cifar10_trades_he"))
        49000
    """
    settings = config.data
    if settings.train_examples:
        return settings.train_examples
    return _TRAINING_IMAGES[settings.name] - settings.validation_examples


def passes_of(objective: dict) -> PassCounts:
    """Returns the passes for one example and epoch of a configured objective.

    Example:
        >>> passes_of({"name": "alp", "num_steps": 10})
        PassCounts(forward=12, input_gradient=12, weight_gradient=2)
    """
    name, base = objective["name"], objective.get("base")
    if base is not None:
        inside = {"name": base} if isinstance(base, str) else dict(base)
        inner = passes_of({**objective, "base": None, **inside})
        # RAT trains adversarial training through a clean pass as well; AWP trains everything twice.
        more = inner.weight_gradient if name == "awp" else int(inside["name"] != "trades")
        return PassCounts(*(count + more for count in inner))
    num_steps, num_replays = objective.get("num_steps", 1), objective.get("num_replays", 1)
    return pass_counts(name, num_steps, num_replays)


def multiply_adds(network: str, input_shape: tuple[int, int, int], **options) -> int:
    """Counts the multiply-adds of a forward pass of one image.

    Args:
        network: its name.
        input_shape: of the images.
        **options: of the network.

    Example:
        >>> round(multiply_adds("wide-resnet-34-10", (32, 32, 3)) / 1e9, 2)
        6.66
    """
    import he_keras as he

    convolutions = convolutions_of(he.networks.get(network, input_shape, **options))
    return sum(each.multiply_accumulates for each in convolutions)


def measured_speed(
    batch_size: int,
    rounds: int,
    network: str = _MEASURED_NETWORK,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    **options,
) -> float:
    """Returns operations per second of a forward and full backward pass here.

    Args:
        batch_size: images in the pass.
        rounds: how often it is measured; the best counts.
        network: its name.
        input_shape: of the images.
        **options: of the network.
    """
    import tensorflow as tf

    import he_keras as he

    model = he.networks.get(network, input_shape, **options)
    images = tf.constant(np.random.default_rng(0).random((batch_size, *input_shape), np.float32))

    @tf.function
    def training_pass():
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        gradients = tape.gradient(loss, [images, *model.trainable_variables])
        return tf.add_n([tf.reduce_sum(each) for each in gradients])

    best = best_seconds(training_pass, rounds)
    passes = 1 + 2
    forward = _MULTIPLY_ADD * multiply_adds(network, input_shape, **options)
    return batch_size * passes * forward / best
