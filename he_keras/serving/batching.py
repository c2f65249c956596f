"""Merges concurrent requests into one run of the model."""

import asyncio
import logging
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from he_keras.serving.request_error import RequestError
from he_keras.serving.servable import Servable, Signature
from he_keras.serving.settings import ServingSettings

_LOGGER = logging.getLogger("he_keras.serving")
# The errors of TensorFlow that a client causes. TensorFlow Serving also answers them with 400.
_CLIENT_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.FailedPreconditionError,
    tf.errors.OutOfRangeError,
)


# This many times the pixels of one run may wait.
_RUNS_IN_QUEUE = 16


class _Task(NamedTuple):
    """One request. `num_rows` is 1 if it runs alone; `pixels` counts those to be decoded."""

    key: tuple
    servable: Servable
    signature: Signature
    arrays: dict
    num_rows: int
    pixels: int
    deadline: float
    future: asyncio.Future


class Batcher:
    """Merges requests of one signature, version and shape. One thread runs them.

    The first request of a batch waits `batch_timeout_ms` for others. Requests that come while the
    model runs form the next batch. Batches are not padded: a loaded signature is a fixed graph, so
    a new batch size causes no new trace. A run decodes no more pixels than one request may have, so
    that other requests do not wait for long.

    Args:
        settings: the limits: batch size, waiting time, length of the queue, time of an answer.
        metrics: records runs and the queue.
    """

    def __init__(self, settings: ServingSettings, metrics):
        self._max_batch_size = settings.max_batch_size
        self._batch_timeout = settings.batch_timeout_ms / 1000
        self._max_queue = settings.max_queue
        self._max_pixels = settings.max_request_pixels
        self._timeout_seconds = settings.timeout_seconds
        self._metrics = metrics
        self._wake = threading.Condition()
        self._waiting: dict[tuple, deque[_Task]] = {}
        self._num_rows: dict[tuple, int] = {}
        self._pixels = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="he-keras-model", daemon=True)
        self._thread.start()

    async def run(
        self, servable: Servable, signature_name: str, arrays: dict, pixels: int = 0
    ) -> dict:
        """Returns the outputs for one request, whose images have `pixels` pixels together.

        Raises:
            RequestError: 400 if it has no examples or too many, or if the model refuses it; 500 if
                the model fails; 503 if the queue is full; 504 if it takes too long.
        """
        signature = servable.signature(signature_name)
        num_rows = self._count(signature, arrays)
        loop = asyncio.get_running_loop()
        key: tuple = (servable, signature_name, *(each.shape[1:] for each in arrays.values()))
        future: asyncio.Future = loop.create_future()
        if not signature.is_batched:
            key = (future,)
        deadline = time.monotonic() + self._batch_timeout
        task = _Task(key, servable, signature, arrays, num_rows, pixels, deadline, future)
        with self._wake:
            self._enqueue(task)
        timer = loop.call_later(self._timeout_seconds, _give_up, future, self._timeout_seconds)
        try:
            return await future
        finally:
            timer.cancel()
            # If it is not done, nobody waits for it any more, and the thread skips it.
            future.cancel()

    def stop(self) -> None:
        """Ends the thread after its current run."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _count(self, signature: Signature, arrays: dict) -> int:
        if not signature.is_batched:
            return 1
        sizes = {len(array) for array in arrays.values()}
        if max(sizes) > self._max_batch_size:
            raise RequestError(
                400, f"Expected at most {self._max_batch_size} examples; received {max(sizes)}"
            )
        if len(sizes) > 1 or 0 in sizes:
            raise RequestError(
                400, f"Expected inputs of one batch size, at least 1; received {sorted(sizes)}"
            )
        return sizes.pop()

    def _enqueue(self, task: _Task) -> None:
        total = sum(self._num_rows.values())
        if total + task.num_rows > self._max_queue:
            raise RequestError(503, f"The queue is full: {total} examples wait; try again")
        if self._pixels + task.pixels > _RUNS_IN_QUEUE * self._max_pixels:
            raise RequestError(503, f"The queue is full: {self._pixels} pixels wait; try again")
        self._pixels += task.pixels
        self._waiting.setdefault(task.key, deque()).append(task)
        self._num_rows[task.key] = self._num_rows.get(task.key, 0) + task.num_rows
        self._metrics.set_queue(total + task.num_rows)
        # The thread is woken only if it can begin: every wake-up takes the interpreter's lock.
        if not total or self._num_rows[task.key] >= self._max_batch_size:
            self._wake.notify()

    def _work(self) -> None:
        while tasks := self._next_batch():
            alive = [task for task in tasks if not task.future.done()]
            if alive:
                _deliver(self._run(alive))
            # Without this, the waiting thread would keep an old version of a model in memory.
            del tasks, alive

    def _next_batch(self) -> list[_Task]:
        """Waits until the oldest request's batch is full or due. Returns nothing at the end."""
        with self._wake:
            while not self._waiting and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return []
            key = min(self._waiting, key=lambda each: self._waiting[each][0].deadline)
            deadline = self._waiting[key][0].deadline
            while self._num_rows[key] < self._max_batch_size and not self._stopping:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._waiting[key][0].signature.is_batched:
                    break
                self._wake.wait(remaining)
            return self._take(key)

    def _take(self, key: tuple) -> list[_Task]:
        waiting, tasks, num_rows, pixels = self._waiting[key], [], 0, 0
        while (
            waiting
            and num_rows + waiting[0].num_rows <= self._max_batch_size
            and pixels + waiting[0].pixels <= self._max_pixels
        ):
            num_rows += waiting[0].num_rows
            pixels += waiting[0].pixels
            tasks.append(waiting.popleft())
        self._num_rows[key] -= num_rows
        self._pixels -= pixels
        if not waiting:
            del self._waiting[key], self._num_rows[key]
        self._metrics.set_queue(sum(self._num_rows.values()))
        return tasks

    def _run(self, tasks: list[_Task]) -> list[tuple[_Task, object]]:
        """Returns the outputs or the error of each task.

        A batch that fails is halved, so that only the requests at fault fail.
        """
        servable, signature = tasks[0].servable, tasks[0].signature
        began = time.perf_counter()
        try:
            outputs = signature.run(_merged(tasks))
            parts = _split(outputs, tasks) if signature.is_batched else [outputs]
        # No error of a model may end the thread that runs all models.
        except Exception as error:
            if len(tasks) > 1:
                middle = len(tasks) // 2
                return self._run(tasks[:middle]) + self._run(tasks[middle:])
            return [(tasks[0], _as_request_error(error))]
        num_rows = sum(task.num_rows for task in tasks)
        self._metrics.observe_run(servable.name, num_rows, time.perf_counter() - began)
        return list(zip(tasks, parts, strict=True))


def _give_up(future: asyncio.Future, timeout_seconds: float) -> None:
    if not future.done():
        future.set_exception(RequestError(504, f"No answer within {timeout_seconds:g} seconds"))


def _merged(tasks: list[_Task]) -> dict[str, np.ndarray]:
    if len(tasks) == 1:
        return tasks[0].arrays
    return {name: np.concatenate([task.arrays[name] for task in tasks]) for name in tasks[0].arrays}


def _split(outputs: dict, tasks: list[_Task]) -> list[dict]:
    ends = np.cumsum([task.num_rows for task in tasks])
    wrong = [name for name, array in outputs.items() if len(array) != ends[-1]]
    if wrong:
        raise RequestError(500, f"Output {wrong[0]} does not have one value for each example")
    return [
        {name: array[end - task.num_rows : end] for name, array in outputs.items()}
        for task, end in zip(tasks, ends, strict=True)
    ]


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, _CLIENT_ERRORS):
        return RequestError(400, str(error.message).splitlines()[0][:500])
    _LOGGER.error("The model failed: %s", error, exc_info=error)
    return RequestError(500, "The model failed; the server's log says why")


def _deliver(results: list[tuple[_Task, object]]) -> None:
    """Hands over all results in one call, because each call into the loop's thread wakes it."""

    def set_results() -> None:
        for task, result in results:
            if task.future.done():
                continue
            if isinstance(result, Exception):
                task.future.set_exception(result)
            else:
                task.future.set_result(result)

    loop = results[0][0].future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(set_results)
