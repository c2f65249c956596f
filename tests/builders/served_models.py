"""Small SavedModels and a running `tools/serve.py` for the tests of serving."""

import contextlib
import re
import shutil
import signal

import numpy as np
import requests
import tensorflow as tf
from forked_programs import Program, run_script
from waiting import wait_until

from he_keras.serving import ServingSettings, serve

LABELS = ("cat", "dog", "frog")


class PixelModel(tf.Module):
    """Logits are three pixels times a factor, which tells versions apart."""

    def __init__(self, factor):
        super().__init__()
        self.factor = tf.Variable(float(factor))
        self.labels = tf.constant(LABELS)

    def outputs(self, images):
        logits = self.factor * images[:, 0, :, 0]
        probabilities = tf.nn.softmax(logits)
        classes = tf.argmax(logits, axis=-1)
        return {
            "logits": logits,
            "probabilities": probabilities,
            "classes": classes,
            "scores": tf.reduce_max(probabilities, axis=-1),
            "labels": tf.gather(self.labels, classes),
        }

    @tf.function(input_signature=[tf.TensorSpec([None, 2, 3, 1], tf.float32, "images")])
    def floats(self, images):
        return self.outputs(images)

    @tf.function(input_signature=[tf.TensorSpec([None, 2, 3, 1], tf.uint8, "images")])
    def integers(self, images):
        return self.outputs(tf.cast(images, tf.float32) / 255.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "images")])
    def encoded(self, images):
        decoded = tf.map_fn(self.decode, images, fn_output_signature=tf.float32)
        return self.outputs(decoded)

    def decode(self, data):
        image = tf.io.decode_image(data, 1, expand_animations=False)
        resized = tf.image.resize(tf.cast(image, tf.float32) / 255.0, [2, 3])
        return tf.ensure_shape(resized, [2, 3, 1])

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int32, "a"),
            tf.TensorSpec([None, 2], tf.float32, "b"),
        ]
    )
    def pair(self, a, b):
        return {
            "sum": tf.cast(a, tf.float32) + tf.reduce_sum(b, axis=-1),
            "raw_bytes": same_bytes(a),
        }

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def half(self, x):
        return {"y": x / 2}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def slow(self, x):
        """Takes a second or so: a product of matrices many times over."""
        matrix = tf.fill([700, 700], 1e-6)
        condition = lambda step, _: step < 120  # noqa: E731
        body = lambda step, product: (step + 1, product @ matrix)  # noqa: E731
        _, product = tf.while_loop(condition, body, (0, matrix), parallel_iterations=1)
        return {"y": x / 2 + 0.0 * product[0, 0]}

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32, "x")])
    def scalar(self, x):
        return {"y": x / 2}


def same_bytes(like):
    return tf.fill(tf.shape(like), tf.constant(b"\xff\x00"))


def save_model(folder, factor=2.0, names=None):
    model = PixelModel(factor)
    signatures = {
        "serving_default": model.floats,
        "serve_uint8": model.integers,
        "serve_bytes": model.encoded,
        "pair": model.pair,
        "half": model.half,
        "scalar": model.scalar,
        "slow": model.slow,
    }
    chosen = {name: signatures[name] for name in names or signatures}
    tf.saved_model.save(model, str(folder), signatures=chosen)
    return folder


def publish(template, folder, version):
    """Puts a copy of a SavedModel into a folder of versions, complete at once as exports do."""
    partial = folder / f".partial-{version}"
    shutil.copytree(template, partial)
    partial.rename(folder / str(version))


def random_images(count, seed=0):
    return np.random.RandomState(seed).rand(count, 2, 3, 1).astype("float32")


def encoded_png(pixels):
    return tf.io.encode_png(tf.constant(pixels, tf.uint8)).numpy()


def serve_pixels(folder, port):
    """A server that looks for new versions all the time."""
    serve({"pixels": folder}, ServingSettings(port=int(port), poll_seconds=0.05))


class RunningServer:
    """`tools/serve.py` in a process of its own."""

    def __init__(self, *arguments, port=0):
        threads = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = Program(
            run_script, "tools/serve.py", f"--port={port}", *arguments, **threads
        )
        wait_until(lambda: "\n" in self.process.texts()[0] or self.process.poll() is not None)
        self.first_line = self.process.texts()[0]
        address = re.search(r"http://\S+?:(\d+)", self.first_line)
        self.url = address[0] if address else None
        self.port = int(address[1]) if address else None

    def predict(self, document, path="/v1/models/pixels:predict", **options):
        if isinstance(document, bytes):
            return requests.post(self.url + path, data=document, timeout=60, **options)
        return requests.post(self.url + path, json=document, timeout=60, **options)

    def status(self, name="pixels"):
        answer = requests.get(f"{self.url}/v1/models/{name}", timeout=60).json()
        return {each["version"]: each for each in answer["model_version_status"]}

    def metric(self, name):
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    def memory_mib(self):
        return self.metric("process_resident_memory_bytes") / 2**20

    def wait_for(self, condition):
        wait_until(condition, self.log)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, errors = self.process.communicate()
        return self.process.returncode, out.removeprefix(self.first_line), errors

    def log(self):
        return self.process.texts()[1]


@contextlib.contextmanager
def running_server(*arguments, **options):
    server = RunningServer(*arguments, **options)
    try:
        assert server.url, server.log()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
