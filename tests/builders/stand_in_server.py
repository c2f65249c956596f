"""A server on loopback with a stand-in for the model, whose runs the tests hold up."""

import asyncio
import contextlib
import socket
import threading

import requests
import tensorflow as tf

from he_keras.serving.application import Application
from he_keras.serving.batching import Batcher
from he_keras.serving.metrics import Metrics
from he_keras.serving.servable import Servable, Signature
from he_keras.serving.server import answer_until
from he_keras.serving.settings import ServingSettings

PATH = "/v1/models/m:predict"
GOOD = {"instances": [1.0, 2.0]}


class HeldSignature:
    """Doubles numbers, or counts images; waits at its gate."""

    is_batched = True

    def __init__(self, spec):
        self.inputs = {spec.name: spec}
        self.gate, self.is_entered, self.sizes = threading.Event(), threading.Event(), []
        self.gate.set()

    num_values = Signature.num_values

    def run(self, arrays):
        self.is_entered.set()
        assert self.gate.wait(60)
        (values,) = arrays.values()
        self.sizes.append(len(values))
        return {"y": 2 * values if values.dtype != object else values == b""}


class OneModel:
    """A repository, its one model, and the one version of that."""

    name, is_complete = "m", True

    def __init__(self):
        self.signatures = {
            "serving_default": HeldSignature(tf.TensorSpec([None], tf.float32, "x")),
            "serve_bytes": HeldSignature(tf.TensorSpec([None], tf.string, "images")),
        }
        self.numbers, self.images = self.signatures.values()

    def model(self, name):
        return self

    def servable(self, version):
        return self

    def __contains__(self, name):
        return name == self.name

    def signature(self, name):
        return self.signatures[name]

    most_values = Servable.most_values

    @contextlib.contextmanager
    def in_use(self):
        yield self


class Running:
    """A server in a thread of its own."""

    def __init__(self, **limits):
        self.settings = ServingSettings(**{"batch_timeout_ms": 0, **limits})
        self.model, self.metrics = OneModel(), Metrics()
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        is_listening = threading.Event()
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self._run(is_listening.set)), daemon=True
        )
        self.thread.start()
        assert is_listening.wait(60)

    async def _run(self, on_listening):
        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        batcher = Batcher(self.settings, self.metrics)
        answers = Application(self.model, batcher, self.metrics, self.settings)
        await answer_until(self.stopping, answers, self.settings, self.listener, on_listening)
        batcher.stop()

    def begin_to_stop(self):
        self.loop.call_soon_threadsafe(self.stopping.set)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def predict(self, document, **options):
        return requests.post(self.url + PATH, json=document, timeout=60, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for signature in self.model.signatures.values():
            signature.gate.set()
        if self.thread.is_alive():
            self.begin_to_stop()
        self.thread.join(60)
        self.listener.close()
        assert not self.thread.is_alive()
