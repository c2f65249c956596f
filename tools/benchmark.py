"""Measures this machine: `python tools/benchmark.py data`.

data: images per second of the CIFAR-10 training pipeline (crop and flip), beside what PGD-10
training of the smallest network (LeNet) consumes on images of the same size. Synthetic images: the
pixels do not matter for the time.
"""

import time

from absl import flags

from he_keras_tools import cli

_SECONDS = flags.DEFINE_float("seconds", 4.0, "Seconds for each measurement.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per batch.")
_BENCHMARKS = ("data",)
# `cli` allows so many arguments that are not flags.
POSITIONAL = 1


def main(arguments) -> None:
    """Runs the benchmark named on the command line."""
    if len(arguments) != 2 or arguments[1] not in _BENCHMARKS:
        cli.fail(f"Unknown benchmark; expected one of {_BENCHMARKS}; received {arguments[1:]}")
    pipeline = _pipeline_speed()
    training = _training_speed()
    print(f"input pipeline, crop and flip:  {pipeline:>10,.0f} images/s")
    print(f"PGD-10 training of LeNet:       {training:>10,.0f} images/s")
    print(f"ratio:                          {pipeline / training:>10.1f}")


def _stream(epochs: int):
    import he_keras as he

    dataset = he.data.synthetic("cifar10", num_examples=20_000)
    return he.data.train_pipeline(
        dataset, _BATCH_SIZE.value, augmentation="crop-flip", epochs=epochs
    )


def _pipeline_speed() -> float:
    import he_keras as he

    return he.data.measure_throughput(_stream(1000), max_seconds=_SECONDS.value)


def _training_speed() -> float:
    import keras

    import he_keras as he

    model = he.HEAdversarialModel(
        he.networks.LeNet((32, 32, 3)),
        he.CosineHead(10),
        objective=he.objectives.PGDAT(he.ThreatModel("linf", "8/255"), num_steps=10),
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    batches = list(_stream(1).take(8))
    step = lambda: [model.train_on_batch(*batch) for batch in batches]  # noqa: E731
    step()
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS.value:
        step()
        rounds += 1
    return rounds * len(batches) * _BATCH_SIZE.value / (time.perf_counter() - began)


if __name__ == "__main__":
    cli.run(main)
