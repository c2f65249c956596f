"""Serves exported models over HTTP, with TensorFlow Serving's REST predict API.

he-keras serve --model_dir=serving/cifar10
he-keras serve --model_dir=serving/cifar10 --model_dir=digits=serving/other --port=8600

A folder holds versions, `<folder>/<version>/saved_model.pb`; the newest that loads is served, and
newer ones as they appear. The manual is docs/how-to/serve.md.
"""

import logging
import logging.handlers
import pathlib

from absl import flags

from he_keras.programs import cli

_MODEL_DIR = flags.DEFINE_multi_string(
    "model_dir", [], "Folder of a model's versions, or NAME=FOLDER; may be given several times."
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer("port", 8501, "Port to listen on; 0 takes a free one.")
_MAX_BATCH_SIZE = flags.DEFINE_integer("max_batch_size", 32, "Examples of one run and request.")
_BATCH_TIMEOUT_MS = flags.DEFINE_float(
    "batch_timeout_ms", 2.0, "How long the first request of a batch waits for others."
)
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 1024, "Examples that may wait for the model.")
_MAX_BODY_BYTES = flags.DEFINE_integer("max_body_bytes", 16 * 2**20, "Size of a request's body.")
_MAX_IMAGE_PIXELS = flags.DEFINE_integer(
    "max_image_pixels", 2048 * 2048, "Pixels of one PNG or JPEG."
)
_MAX_REQUEST_PIXELS = flags.DEFINE_integer(
    "max_request_pixels", 4 * 2048 * 2048, "Pixels of all images of a request."
)
_MAX_CONNECTIONS = flags.DEFINE_integer("max_connections", 512, "Connections that may be open.")
_HEADER_TIMEOUT_SECONDS = flags.DEFINE_float(
    "header_timeout_seconds", 10.0, "For the head of a request to arrive."
)
_TIMEOUT_SECONDS = flags.DEFINE_float(
    "timeout_seconds", 30.0, "For a body to arrive, and for an answer to be computed."
)
_POLL_SECONDS = flags.DEFINE_float("poll_seconds", 1.0, "How often to look for new versions.")


def main(_argv) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    from he_keras import serving

    with cli.one_line_errors():
        settings = serving.ServingSettings(
            host=_HOST.value,
            port=_PORT.value,
            max_batch_size=_MAX_BATCH_SIZE.value,
            batch_timeout_ms=_BATCH_TIMEOUT_MS.value,
            max_queue=_MAX_QUEUE.value,
            max_body_bytes=_MAX_BODY_BYTES.value,
            max_image_pixels=_MAX_IMAGE_PIXELS.value,
            max_request_pixels=_MAX_REQUEST_PIXELS.value,
            max_connections=_MAX_CONNECTIONS.value,
            header_timeout_seconds=_HEADER_TIMEOUT_SECONDS.value,
            timeout_seconds=_TIMEOUT_SECONDS.value,
            poll_seconds=_POLL_SECONDS.value,
        )
        serving.serve(_models(_MODEL_DIR.value), settings, _Operator())


def _models(arguments: list[str]) -> dict[str, str | pathlib.Path]:
    if not arguments:
        raise ValueError("No model; expected --model_dir=FOLDER or NAME=FOLDER; received none")
    models: dict[str, str | pathlib.Path] = {}
    for argument in arguments:
        name, _, folder = argument.rpartition("=")
        path = pathlib.Path(folder)
        name = name or path.resolve().name
        if name in models:
            raise ValueError(f"Two models of one name; expected NAME=FOLDER; received {name} twice")
        models[name] = path
    return models


class _Operator:
    """Tells the operator what happens, once the server listens.

    If the server cannot start, the error says everything in one line.
    """

    def __init__(self) -> None:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        never = logging.CRITICAL + 1
        self._held = logging.handlers.MemoryHandler(1000, never, lines, flushOnClose=False)
        logger = logging.getLogger("he_keras.serving")
        logger.handlers = [self._held]
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def __call__(self, url: str, versions: dict[str, int]) -> None:
        self._held.flush()
        self._held.flushLevel = logging.NOTSET
        listed = ", ".join(f"{name} (version {version})" for name, version in versions.items())
        print(f"Serving {listed} at {url}; Ctrl-C ends", flush=True)
