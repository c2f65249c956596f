"""Batches of concurrent requests, with a model that records its runs."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from he_keras.serving.batching import Batcher
from he_keras.serving.metrics import Metrics
from he_keras.serving.settings import ServingSettings


class RecordingSignature:
    inputs = {"x": tf.TensorSpec([None], tf.float32, "x")}

    def __init__(self, is_batched=True):
        self.is_batched = is_batched
        self.runs = []
        self.gate, self.is_entered = threading.Event(), threading.Event()
        self.gate.set()

    def run(self, arrays):
        self.is_entered.set()
        self.gate.wait()
        x = arrays["x"]
        self.runs.append(x.tolist())
        if np.any(x < 0):
            raise tf.errors.InvalidArgumentError(None, None, "negative")
        if np.any(x > 1e6):
            raise MemoryError("too much")
        return {"y": x[:-1] if np.any(x == 666) else 2 * x}


class Model:
    name = "m"

    def __init__(self, **options):
        self.signatures = {"s": RecordingSignature(**options), "t": RecordingSignature(**options)}

    def signature(self, name):
        return self.signatures[name]

    @property
    def runs(self):
        return self.signatures["s"].runs


@pytest.fixture
def batcher_of():
    made = []

    def make(**settings):
        made.append(Batcher(ServingSettings(**settings), Metrics()))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def ask_all(batcher, model, *inputs, signature="s"):
    async def run():
        asked = [batcher.run(model, signature, {"x": np.float32(x)}) for x in inputs]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def busy_thread(batcher):
    """Keeps the batcher's thread in a run: what is asked meanwhile waits together."""
    busy = Model()
    signature = busy.signature("s")
    signature.gate.clear()
    first = asyncio.ensure_future(batcher.run(busy, "s", {"x": np.float32([0])}))
    try:
        while not signature.is_entered.is_set():
            await asyncio.sleep(0.001)
        yield
    finally:
        signature.gate.set()
    await first


async def asked(*runs):
    """The same runs as tasks that have reached the queue."""
    tasks = [asyncio.ensure_future(each) for each in runs]
    await asyncio.sleep(0)
    return tasks


def outputs(results):
    return [each if isinstance(each, Exception) else each["y"].tolist() for each in results]


def test_requests_share_a_run_and_get_their_own_parts(batcher_of):
    model = Model()
    batcher = batcher_of(max_batch_size=8, batch_timeout_ms=30_000)
    results = ask_all(batcher, model, [1], [2, 3], [4, 5, 6, 7], [8])
    assert outputs(results) == [[2], [4, 6], [8, 10, 12, 14], [16]]
    assert model.runs == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_a_full_batch_does_not_wait(batcher_of):
    # One that waited for company would be given up on after 30 seconds, without an answer.
    batcher, model = batcher_of(max_batch_size=2, batch_timeout_ms=3_000_000), Model()

    async def run():
        first = asyncio.ensure_future(batcher.run(model, "s", {"x": np.float32([1])}))
        # Long enough for the thread to wait for company.
        await asyncio.sleep(0.1)
        return await asyncio.gather(first, batcher.run(model, "s", {"x": np.float32([2])}))

    assert outputs(asyncio.run(run())) == [[2], [4]]


def test_a_batch_stays_within_its_size_and_in_order(batcher_of):
    model = Model()
    batcher = batcher_of(max_batch_size=4, batch_timeout_ms=30_000)
    ask_all(batcher, model, [1, 2, 3], [4, 5], [6], [7])
    assert model.runs == [[1, 2, 3], [4, 5, 6, 7]]


def test_shapes_signatures_and_versions_do_not_mix(batcher_of):
    batcher = batcher_of(max_batch_size=8, batch_timeout_ms=0)
    first, second = Model(), Model()

    async def run():
        async with busy_thread(batcher):
            tasks = await asked(
                batcher.run(first, "s", {"x": np.float32([1])}),
                batcher.run(second, "s", {"x": np.float32([2])}),
                batcher.run(first, "t", {"x": np.float32([3])}),
                batcher.run(first, "s", {"x": np.float32([[4, 5]])}),
                batcher.run(first, "s", {"x": np.float32([6])}),
            )
        return await asyncio.gather(*tasks)

    assert outputs(asyncio.run(run())) == [[2], [4], [6], [[8, 10]], [12]]
    assert first.runs == [[1, 6], [[4, 5]]]


def test_a_failing_request_does_not_fail_its_neighbours(batcher_of):
    batcher = batcher_of(max_batch_size=16, batch_timeout_ms=50)
    results = ask_all(batcher, Model(), [1], [-1], [2], [2e6], [666], [3])
    assert outputs([results[0], results[2], results[5]]) == [[2], [4], [6]]
    assert [results[index].status for index in (1, 3, 4)] == [400, 500, 500]
    assert str(results[1]) == "negative"
    assert "too much" not in str(results[3])


def test_a_signature_without_batches_runs_each_request_alone(batcher_of):
    model = Model(is_batched=False)
    batcher = batcher_of(max_batch_size=8, batch_timeout_ms=30_000)
    ask_all(batcher, model, [1], [2])
    assert model.runs == [[1], [2]]


def test_limits_of_a_request(batcher_of):
    batcher = batcher_of(max_batch_size=2)
    results = ask_all(batcher, Model(), [1, 2, 3], [])
    assert [each.status for each in results] == [400, 400]
    assert "at most 2 examples; received 3" in str(results[0])


def test_a_full_queue_and_slow_answers(batcher_of):
    model = Model()
    signature = model.signatures["s"]
    signature.gate.clear()
    batcher = batcher_of(max_batch_size=1, max_queue=3, timeout_seconds=0.3)

    async def run():
        first = asyncio.ensure_future(batcher.run(model, "s", {"x": np.float32([1])}))
        while not signature.is_entered.is_set():
            await asyncio.sleep(0.001)
        more = [batcher.run(model, "s", {"x": np.float32([n])}) for n in (2, 3, 4, 5)]
        return await asyncio.gather(first, *more, return_exceptions=True)

    results = asyncio.run(run())
    assert [each.status for each in results] == [504, 504, 504, 504, 503]
    # What nobody waits for any more is not computed.
    batcher._timeout_seconds = 60
    signature.gate.set()
    while batcher._waiting:
        time.sleep(0.001)
    assert outputs(ask_all(batcher, model, [9])) == [[18]]
    assert model.runs == [[1], [9]]


def test_a_cancelled_request_is_not_run(batcher_of):
    model = Model()
    batcher = batcher_of(max_batch_size=8, batch_timeout_ms=0)

    async def run():
        async with busy_thread(batcher):
            gone, stays = await asked(
                batcher.run(model, "s", {"x": np.float32([1])}),
                batcher.run(model, "s", {"x": np.float32([2])}),
            )
            gone.cancel()
            # So that it has heard of it.
            await asyncio.wait([gone])
        return await stays

    assert asyncio.run(run())["y"].tolist() == [4]
    assert model.runs == [[2]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_size": 0},
        {"max_queue": 3, "max_batch_size": 4},
        {"port": 70_000},
        {"batch_timeout_ms": -1.0},
        {"timeout_seconds": float("nan")},
        {"batch_timeout_ms": float("nan")},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="expected"):
        ServingSettings(**wrong)
