"""One tool in a process of its own: it builds its side of a cell, then steps on request.

Separate processes give each tool its own threads, memory and first step; those that wait for their
turn sleep. Memory is read from /proc (Linux).
"""

import multiprocessing
import time
from typing import Any

import numpy as np

from he_keras.benchmarks.memory import forget_peak, resident

#: Examples whose logits are compared after the first step.
_COMPARED = 32


class Worker:
    """The parent's end of a process that runs one tool.

    Args:
        tool: "he_keras", "he_keras-arc", "he_keras-linear", "convolutions", "torch:<variant>".
        cell: what to train, see `training.Cell`.
        given: for PyTorch, what he_keras's worker answers to "network".
    """

    def __init__(self, tool: str, cell, given=None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.tool = tool
        arguments = theirs, tool, cell, given
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def ask(self, request: str) -> Any:
        """Sends a request and waits for the answer."""
        self._connection.send(request)
        return self.answer()

    def answer(self) -> Any:
        """Waits for an answer; an error of the worker is raised here."""
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"The process of {self.tool} died") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self.tool} failed: {answer}") from answer
        return answer

    def stop(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(timeout=10)
        self._process.kill()


def _serve(connection, tool: str, cell, given) -> None:
    try:
        side = _build(tool, cell, given)
        while True:
            connection.send(getattr(side, connection.recv())())
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # its type may be one that the parent cannot unpickle
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _build(tool: str, cell, given):
    if tool == "convolutions":
        return _Convolutions(cell)
    if tool.startswith("torch:"):
        return _TorchSide(cell, tool.removeprefix("torch:"), given)
    return KerasSide(cell, tool)


class _Side:
    """What the parent asks of either framework."""

    _before: int

    def _run(self) -> float:
        """Trains on the batch and returns the loss."""
        raise TypeError(f"Expected one framework's side; received {type(self).__name__}")

    def _start_of_memory(self) -> int:
        forget_peak()
        return resident("VmRSS")

    def step(self) -> float:
        """Returns the seconds of one step."""
        began = time.perf_counter()
        self._run()
        return time.perf_counter() - began

    def memory(self) -> int:
        """Returns the bytes that training added to the process at its peak."""
        return resident("VmHWM") - self._before

    def resident(self) -> int:
        """Returns the bytes that the process takes now."""
        return resident("VmRSS")


class KerasSide(_Side):
    """he_keras: the training function of `fit`, on one batch that is fed again and again."""

    def __init__(self, cell, tool: str = "he_keras") -> None:
        import tensorflow as tf

        self._images, labels = example_batch(cell)
        data = tf.data.Dataset.from_tensors((self._images, labels)).cache().repeat()
        self._batches = iter(data.prefetch(2))
        self._before = self._start_of_memory()
        self._cell, self._head = cell, head_of(tool)
        #: Built by `first`.
        self.model: Any = None

    def first(self) -> dict:
        """Builds, traces and runs the first step."""
        began = time.perf_counter()
        self.model = keras_model(self._cell, self._head)
        self.model.make_train_function()
        loss = self._run()
        seconds = time.perf_counter() - began
        logits = self.model(self._images[:_COMPARED], training=False).numpy()
        return {"seconds": seconds, "loss": loss, "logits": logits}

    def network(self) -> dict:
        """Returns what PyTorch starts from: the first step of both must be the same."""
        import tensorflow as tf

        from he_keras.benchmarks.network_weights import weights_of

        model = keras_model(self._cell, self._head)
        return {
            "weights": weights_of(model),
            "margin": model.head.scale * model.head.margin,
            "start": attack_start(self._cell, self._images, tf.constant([0, 0])),
        }

    def evaluated(self, batches: int = 100, looks: int = 10) -> list[tuple[int, int]]:
        """Attacks so many batches; returns batches read and resident bytes, at so many looks.

        An evaluation reads a block of about 1,000 examples, attacks it, and reads the next.
        """
        import tensorflow as tf

        import he_keras as he

        seen: list[int] = []

        def stream():
            for _ in range(batches):
                seen.append(resident("VmRSS"))
                yield self._images, labels

        labels = example_batch(self._cell)[1]
        images_spec = tf.TensorSpec(self._images.shape, tf.float32)
        data = tf.data.Dataset.from_generator(
            stream, output_signature=(images_spec, tf.TensorSpec(labels.shape, tf.int32))
        )
        he.evaluate_robustness(
            self.model,
            data,
            he.ThreatModel("linf", self._cell.epsilon),
            attacks=("pgd-2",),
            batch_size=len(labels),
            mode="individual",
            checks=False,
        )
        # The data are read several times. The attack reads them last.
        during_attack, part = seen[-batches:], batches // looks
        return [(part * (look + 1), during_attack[part * (look + 1) - 1]) for look in range(looks)]

    def _run(self) -> float:
        return float(self.model.train_function(self._batches)["loss"])


class _TorchSide(_Side):
    """PyTorch, from the weights of the same Keras model; TensorFlow is loaded but never used."""

    def __init__(self, cell, variant: str, given: dict) -> None:
        import torch

        from he_keras.benchmarks import torch_twin

        torch.set_num_threads(cell.threads)
        self._twin = torch_twin.twin_of(given["weights"])
        self._margin, self._start = given["margin"], given["start"]
        self._images, self._labels = example_batch(cell)
        self._cell, self._variant = cell, variant
        self._before = self._start_of_memory()
        self._training: Any = None

    def first(self) -> dict:
        """Runs the first step, with whatever compilation it takes."""
        import torch

        from he_keras.benchmarks.torch_training import TorchTraining

        began = time.perf_counter()
        self._training = TorchTraining(self._twin, self._cell, self._variant, self._margin)
        self._batch = (
            self._training.tensor(self._images),
            torch.from_numpy(self._labels.astype("int64")),
            self._training.tensor(self._start),
        )
        loss = self._run()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "loss": loss,
            "logits": self._training.predict(self._batch[0][:_COMPARED]),
        }

    def _run(self) -> float:
        return self._training.step(*self._batch)


class _Convolutions:
    """The convolutions alone, and this machine's matrix product."""

    def __init__(self, cell) -> None:
        from he_keras.benchmarks import convolutions

        model = keras_model(cell)
        self._timer = convolutions.ConvolutionTimer(model.network, cell.batch_size, cell.dtype)
        self._counts = convolutions.pass_counts(cell.objective, cell.num_steps, cell.num_replays)
        self._dtype = cell.dtype

    def first(self) -> dict:
        """Returns what the convolutions of a step compute, and the machine's peak."""
        from he_keras.benchmarks import convolutions

        return {
            "multiply_accumulates": self._timer.multiply_accumulates * sum(self._counts),
            "peak": convolutions.peak_flops(self._dtype),
        }

    def step(self) -> float:
        """Returns the seconds of the convolutions of one step."""
        return self._timer.seconds(self._counts)

    def memory(self) -> int:
        """Returns 0: the memory of the convolutions alone is not measured."""
        return 0


def head_of(tool: str) -> str:
    """Returns "cosine" (HE), or what follows he_keras's name: "arc" (m-HE) or "linear"."""
    return tool.partition("-")[2] or "cosine"


def keras_model(cell, head_name: str = "cosine"):
    """Returns the compiled model of a cell; its weights depend on the cell and the head alone."""
    import keras

    import he_keras as he

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(cell.dtype)
    threat = he.ThreatModel("linf", cell.epsilon)
    if head_name == "linear":
        head = keras.layers.Dense(10)
    else:
        head = he.CosineHead(10, 15.0, 0.2, angle=head_name)
    network = he.networks.get(cell.network, (32, 32, 3))
    objective = he.objectives.get(cell.objective, threat, **cell.objective_settings)
    model = he.HEAdversarialModel(network, head, objective, None)
    model.compile(optimizer=he.optimizers.SGD(cell.optimizer["lr"], 0.9, 5e-4))
    return model


def example_batch(cell):
    """Returns images and labels: noise will do, as nothing is dropped while training."""
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (cell.batch_size, 32, 32, 3)).astype("float32")
    return images, generator.integers(0, 10, cell.batch_size).astype("int32")


def attack_start(cell, images, seed):
    """Where the objective's adversary starts in the first step."""
    import he_keras as he

    kind = cell.objective_settings.get("random_start", False)
    threat = he.ThreatModel("linf", cell.epsilon)
    return np.array(threat.start(kind, images, seed))
