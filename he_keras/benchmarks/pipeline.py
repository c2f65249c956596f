"""Images per second of the input pipeline, and how many training of the smallest network takes.

CIFAR-10's shapes with crop and flip against PGD-10 training of LeNet. Synthetic images: the pixels
do not matter for the time.
"""

import time


def measure(seconds: float, batch_size: int) -> str:
    """Returns the table."""
    pipeline = _pipeline_speed(seconds, batch_size)
    training = _training_speed(seconds, batch_size)
    return "\n".join(
        [
            f"input pipeline, crop and flip:  {pipeline:>10,.0f} images/s",
            f"PGD-10 training of LeNet:       {training:>10,.0f} images/s",
            f"ratio:                          {pipeline / training:>10.1f}",
        ]
    )


def _stream(epochs: int, batch_size: int):
    import he_keras as he

    dataset = he.data.synthetic("cifar10", num_examples=20_000)
    return he.data.train_pipeline(dataset, batch_size, augmentation="crop-flip", epochs=epochs)


def _pipeline_speed(seconds: float, batch_size: int) -> float:
    import he_keras as he

    return he.data.measure_throughput(_stream(1000, batch_size), max_seconds=seconds)


def _training_speed(seconds: float, batch_size: int) -> float:
    import keras

    import he_keras as he

    model = he.HEAdversarialModel(
        he.networks.LeNet((32, 32, 3)),
        he.CosineHead(10),
        objective=he.objectives.PGDAT(he.ThreatModel("linf", "8/255"), num_steps=10),
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    batches = list(_stream(1, batch_size).take(8))
    step = lambda: [model.train_on_batch(*batch) for batch in batches]  # noqa: E731
    step()
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        rounds += 1
    return rounds * len(batches) * batch_size / (time.perf_counter() - began)
