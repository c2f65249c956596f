"""Requests answered by `he-keras serve`, and what the model alone computes, on this machine.

The server runs in a process of its own and `wrk` on loopback asks it, all on the same cores. In
every round the model's own speed is measured next to the requests, so that a ratio compares
neighbours in time. Before the requests it runs on floats, after them by the signature that they ask
for. Images are noise, which PNG cannot shrink: the most bytes to decode.
"""

import base64
import contextlib
import json
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

_LUA = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "application/json"
"""
_NUMBER = r"([\d.]+)"
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


class Payload(NamedTuple):
    """One kind of request.

    Attributes:
        name: as the table shows it.
        signature: the signature it asks for.
        images: images of a request.
        connections: clients at once.
    """

    name: str
    signature: str
    images: int
    connections: int


class Answered(NamedTuple):
    """What wrk reports: images per second, milliseconds, and answers other than 200."""

    speed: float
    p50: float
    p99: float
    errors: int


class Measured(NamedTuple):
    """One measurement of a payload.

    Attributes:
        answered: what wrk reports.
        ratio: images per second over those of the model alone, on floats.
        signature_ratio: the same over the signature asked for, which may decode images too.
        cpu_ratio: CPU time of an image in the model alone, on floats, over that in the
            server: `ratio` without the client's time and whatever else the machine does.
    """

    answered: Answered
    ratio: float
    signature_ratio: float
    cpu_ratio: float


PAYLOADS = (
    Payload("b64 PNG, 1 image", "serve_bytes", 1, 64),
    Payload("b64 PNG, 8 images", "serve_bytes", 8, 12),
    Payload("b64 PNG, 32 images", "serve_bytes", 32, 4),
    Payload("JSON bytes, 1 image", "serve_uint8", 1, 64),
    Payload("JSON bytes, 32 images", "serve_uint8", 32, 4),
    Payload("JSON floats, 1 image", "serving_default", 1, 64),
    Payload("JSON floats, 32 images", "serving_default", 32, 4),
)


def measure(model_dir: str, seconds: float, rounds: int, batch_size: int) -> str:
    """Returns the table.

    Args:
        model_dir: folder of an exported model's versions.
        seconds: of each measurement.
        rounds: of all payloads; the table has the medians.
        batch_size: of the server, and of the model's own run.

    Raises:
        ValueError: if `wrk` is missing or the folder holds no model for images.
    """
    if shutil.which("wrk") is None:
        raise ValueError("No load generator; expected the program wrk; received none on the path")
    model = _OwnSpeed(model_dir, batch_size)
    payloads = [each for each in PAYLOADS if each.signature in model.signatures]
    own: list[float] = []
    results: dict[Payload, list[Measured]] = {each: [] for each in payloads}
    with tempfile.TemporaryDirectory() as folder, _running_server(model_dir, batch_size) as url:
        scripts = {each: _script(each, model.image_shape, folder) for each in payloads}
        for payload in payloads:
            _ask(scripts[payload], payload, url, 1.0)
        for _ in range(rounds):
            for payload in payloads:
                floats, cpu = model.measure("serving_default", seconds)
                before = _cpu_seconds(url)
                answered = _ask(scripts[payload], payload, url, seconds)
                spent = _cpu_seconds(url) - before
                signature, _ = model.measure(payload.signature, seconds)
                own.append(floats)
                images = answered.speed * max(1, round(seconds))
                ratios = answered.speed / floats, answered.speed / signature, cpu * images / spent
                results[payload].append(Measured(answered, *ratios))
    return _table(results, own, batch_size)


class _OwnSpeed:
    """The model in this process, on batches that are in memory already."""

    def __init__(self, model_dir: str, batch_size: int):
        import numpy as np
        import tensorflow as tf

        versions = [each for each in pathlib.Path(model_dir).glob("*") if each.name.isdecimal()]
        if not versions:
            raise ValueError(f"No model; expected a folder of versions; received {model_dir}")
        self._loaded = tf.saved_model.load(str(max(versions, key=lambda each: int(each.name))))
        self.signatures = self._loaded.signatures
        shape = self.signatures["serving_default"].structured_input_signature[1]["images"].shape
        self.image_shape = tuple(shape[1:])
        self._batch_size = batch_size
        integers = np.random.default_rng(0).integers(0, 256, (batch_size, *shape[1:]), np.uint8)
        self._images = {
            "serving_default": tf.constant(integers / np.float32(255)),
            "serve_uint8": tf.constant(integers),
        }
        if "serve_bytes" in self.signatures:
            self._images["serve_bytes"] = tf.stack([tf.io.encode_png(each) for each in integers])

    def measure(self, signature: str, seconds: float) -> tuple[float, float]:
        """Returns images per second, and CPU seconds of one image."""
        run, images = self.signatures[signature], self._images[signature]
        run(images=images)
        began, cpu_began, runs = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            run(images=images)["logits"].numpy()
            runs += 1
        count = runs * self._batch_size
        speed = count / (time.perf_counter() - began)
        return speed, (time.process_time() - cpu_began) / count


@contextlib.contextmanager
def _running_server(model_dir: str, batch_size: int) -> Iterator[str]:
    import he_keras_cli

    launcher = [sys.executable, he_keras_cli.__file__, "serve"]
    command = [*launcher, f"--model_dir=load={model_dir}", "--port=0"]
    command += [f"--max_batch_size={batch_size}", "--batch_timeout_ms=5"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = server.stdout.readline() if server.stdout else ""
        address = re.search(r"http://[^;\s]+", said)
        if not address:
            raise ValueError(f"The server did not start; expected {model_dir} to be served")
        yield f"{address[0]}/v1/models/load:predict"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _script(payload: Payload, image_shape: tuple, folder: str) -> pathlib.Path:
    body = pathlib.Path(folder) / f"{payload.signature}-{payload.images}.json"
    body.write_text(
        json.dumps(
            {"signature_name": payload.signature, "instances": _images(payload, image_shape)}
        )
    )
    script = body.with_suffix(".lua")
    script.write_text(_LUA.format(body=body))
    return script


def _images(payload: Payload, image_shape: tuple) -> list:
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(1)
    if payload.signature == "serving_default":
        floats = generator.random((payload.images, *image_shape), np.float32)
        # Rounded through text: otherwise each number would show the digits of a double.
        return floats.astype(str).astype(float).tolist()
    integers = generator.integers(0, 256, (payload.images, *image_shape), np.uint8)
    if payload.signature == "serve_uint8":
        return integers.tolist()
    pictures = [tf.io.encode_png(each).numpy() for each in integers]
    return [{"b64": base64.b64encode(each).decode()} for each in pictures]


def _cpu_seconds(url: str) -> float:
    with urllib.request.urlopen(urllib.parse.urljoin(url, "/metrics")) as answer:
        text = answer.read().decode()
    (seconds,) = re.findall(r"^process_cpu_seconds_total (\S+)", text, re.MULTILINE)
    return float(seconds)


def _ask(script: pathlib.Path, payload: Payload, url: str, seconds: float) -> Answered:
    options = [f"-c{payload.connections}", f"-d{max(1, round(seconds))}s", "-t1", "--latency"]
    command = ["wrk", *options, "--timeout=30s", "-s", str(script), url]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read_report(report, payload.images)


def read_report(report: str, images: int) -> Answered:
    r"""Reads what wrk prints.

    Args:
        report: its standard output, run with `--latency`.
        images: images of a request.

    Example:
        >>> text = "50%  2.00ms\n99%  1.10s\nRequests/sec:  10.0\nNon-2xx or 3xx responses: 3"
        >>> read_report(text, 4)
        Answered(speed=40.0, p50=2.0, p99=1100.0, errors=3)
    """
    speed = re.search(rf"Requests/sec:\s+{_NUMBER}", report)
    errors = re.search(r"Non-2xx or 3xx responses: (\d+)", report)
    latencies = {
        percent: float(number) * _UNITS[unit]
        for percent, number, unit in re.findall(rf"(50|99)%\s+{_NUMBER}(us|ms|s|m)", report)
    }
    if not speed or latencies.keys() != {"50", "99"}:
        raise ValueError(f"Unexpected report of wrk; received {report[:500]}")
    return Answered(
        float(speed[1]) * images, latencies["50"], latencies["99"], int(errors[1]) if errors else 0
    )


def _table(results: dict[Payload, list[Measured]], own: list[float], batch_size: int) -> str:
    lines = [
        f"model alone, batches of {batch_size}: median {statistics.median(own):,.0f} images/s "
        f"({min(own):,.0f} to {max(own):,.0f})",
        f"{'payload':<24}{'clients':>8}{'images/s':>10}{'ratio':>7}{'from-to':>12}"
        f"{'signature':>11}{'CPU':>6}{'p50 ms':>8}{'p99 ms':>8}{'errors':>8}",
    ]
    for payload, measured in results.items():
        answered = [each.answered for each in measured]
        ratios = [each.ratio for each in measured]
        median = lambda name, of: statistics.median(getattr(each, name) for each in of)  # noqa: E731
        lines.append(
            f"{payload.name:<24}{payload.connections:>8}{median('speed', answered):>10,.0f}"
            f"{statistics.median(ratios):>7.2f}{f'{min(ratios):.2f}-{max(ratios):.2f}':>12}"
            f"{median('signature_ratio', measured):>11.2f}{median('cpu_ratio', measured):>6.2f}"
            f"{median('p50', answered):>8.0f}"
            f"{median('p99', answered):>8.0f}{sum(each.errors for each in answered):>8}"
        )
    return "\n".join(lines)
