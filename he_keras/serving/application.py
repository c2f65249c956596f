"""Answers requests: the paths of TensorFlow Serving, health checks and metrics."""

import asyncio
import contextlib
import json
import logging
import re
import time
import urllib.parse

from he_keras.serving import image_size
from he_keras.serving.batching import Batcher
from he_keras.serving.connections import connection_of
from he_keras.serving.predict_format import PredictRequest, format_answer, parse_request
from he_keras.serving.repository import Model, Repository
from he_keras.serving.request_body import BodyReader
from he_keras.serving.request_error import RequestError, shown
from he_keras.serving.servable import Servable
from he_keras.serving.settings import ServingSettings

_LOGGER = logging.getLogger("he_keras.serving")
# A larger body is parsed in another thread, so that the loop can answer others meanwhile.
_INLINE_BYTES = 64 * 1024
_MODEL = r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_PATHS = {
    "POST": re.compile(_MODEL + r":(?P<verb>classify|regress|predict)", re.ASCII | re.IGNORECASE),
    "GET": re.compile(_MODEL + r"(?:/(?P<verb>metadata))?", re.ASCII | re.IGNORECASE),
}
_JSON = "application/json"
# A body with a few values too many goes on to the parser, whose error message says more.
_SLACK, _FEW_VALUES = 2, 1000


class Application:
    """The handler of every request.

    Args:
        repository: the models.
        batcher: runs the models.
        metrics: counts every answer.
        settings: the limits.
    """

    def __init__(
        self, repository: Repository, batcher: Batcher, metrics, settings: ServingSettings
    ):
        self._repository = repository
        self._batcher = batcher
        self._metrics = metrics
        self._settings = settings
        self._bodies = BodyReader(settings.max_body_bytes, settings.timeout_seconds)
        # Only one at a time: a parsed body is many times as large as its text.
        self._large_bodies = asyncio.Semaphore(1)
        self._in_flight = 0
        self._is_stopping = False
        self._is_drained = asyncio.Event()

    async def drain(self, timeout_seconds: float) -> None:
        """Refuses new requests from now on, and waits until those in flight are answered.

        Meanwhile /readyz answers 503, so that a load balancer sends requests elsewhere.
        """
        self._is_stopping = True
        if self._in_flight:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_drained.wait(), timeout_seconds)

    async def handle(self, request):
        """Answers one aiohttp request. Every error becomes `{"error": message}`."""
        connection = connection_of(request)
        if connection is None:
            return await self._response(request, None)
        connection.body_begins()
        try:
            return await self._response(request, connection)
        finally:
            connection.ends()

    async def _response(self, request, connection):
        from aiohttp import web

        model_name, status, headers = "", 200, {"Content-Type": _JSON}
        path = request.rel_url.raw_path
        try:
            if path[:4].lower() == "/v1/":
                match = self._match(request.method, path)
                if match["name"] in self._repository:
                    model_name = match["name"]
                body = await self._answer(match, request, connection)
            else:
                body, headers = self._answer_about_server(request.method, path)
        except RequestError as error:
            status, body = error.status.value, _error_body(str(error))
            headers |= {"Retry-After": "1"} if status == 503 else {}
        # No request may stop the server, whatever error it causes.
        except Exception:
            _LOGGER.exception("Cannot answer %s %s", request.method, path[:200])
            status, body = 500, _error_body("Internal error; the server's log says why")
        self._metrics.count_request(model_name, status)
        response = web.Response(status=status, body=body, headers=headers)
        if self._is_stopping:
            response.force_close()
        return response

    def _match(self, method: str, path: str) -> dict:
        pattern = _PATHS.get(method)
        match = pattern.fullmatch(path) if pattern else None
        if match is None:
            raise RequestError(400, f"Malformed request: {method[:20]} {path[:200]}")
        parts = match.groupdict()
        parts["name"] = urllib.parse.unquote(parts["name"])
        if parts["label"] is not None:
            raise RequestError(400, f"Unrecognized servable version label: {shown(parts['label'])}")
        # No version has more digits, and `int` refuses thousands of them.
        if len(parts["version"] or "") > 19:
            raise RequestError(400, "Failed to convert version to numeric")
        return parts

    async def _answer(self, match: dict, request, connection) -> bytes:
        model = self._repository.model(match["name"])
        version = None if match["version"] is None else int(match["version"])
        verb = (match["verb"] or "").lower()
        if verb == "predict":
            if self._is_stopping:
                raise RequestError(503, "The server is shutting down; ask another one")
            began = time.perf_counter()
            self._in_flight += 1
            try:
                return await self._predict(model, version, request, connection)
            finally:
                self._in_flight -= 1
                if self._is_stopping and not self._in_flight:
                    self._is_drained.set()
                self._metrics.observe_request(model.name, time.perf_counter() - began)
        if verb == "metadata":
            return _indented(_metadata(model.servable(version)))
        if verb:
            raise RequestError(400, f"Only predict is served; received {verb}")
        return _indented(model.status(version))

    async def _predict(self, model: Model, version: int | None, request, connection) -> bytes:
        with model.servable(version).in_use() as servable:
            body = await self._bodies.read(request)
            if connection is not None:
                connection.answer_is_due()
            try:
                parsed, pixels = await self._parsed(servable, body)
            finally:
                self._bodies.release(body)
            name, arrays = parsed.signature_name, parsed.arrays
            outputs = await self._batcher.run(servable, name, arrays, pixels)
        return format_answer(outputs, parsed.in_rows)

    async def _parsed(self, servable: Servable, body: bytes) -> tuple[PredictRequest, int]:
        if len(body) <= _INLINE_BYTES:
            return self._parse(servable, body)
        async with self._large_bodies:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, self._parse, servable, body)

    def _parse(self, servable: Servable, body: bytes) -> tuple[PredictRequest, int]:
        most = servable.most_values(self._settings.max_batch_size)
        # Counting commas takes a thousandth of the time that it takes to parse millions of values.
        if most is not None and body.count(b",") > _SLACK * (most + _FEW_VALUES):
            raise RequestError(
                413,
                f"The body has far more values than {self._settings.max_batch_size} examples of "
                f"this model; expected at most {most}",
            )
        parsed = parse_request(body, lambda name: servable.signature(name).inputs)
        inputs = servable.signature(parsed.signature_name).inputs
        each, together = self._settings.max_image_pixels, self._settings.max_request_pixels
        return parsed, image_size.checked_pixels(parsed.arrays, inputs, each, together)

    def _answer_about_server(self, method: str, path: str) -> tuple[bytes, dict[str, str]]:
        if path not in ("/healthz", "/readyz", "/metrics"):
            raise RequestError(404, f"Not found: {path[:200]}")
        if method not in ("GET", "HEAD"):
            raise RequestError(405, f"Malformed request: {method[:20]} {path}")
        if path == "/metrics":
            body, content_type = self._metrics.text()
            return body, {"Content-Type": content_type}
        is_ready = self._repository.is_complete and not self._is_stopping
        if path == "/readyz" and not is_ready:
            raise RequestError(503, "Not ready")
        return b'{"status": "ok"}', {"Content-Type": _JSON}


def _metadata(servable: Servable) -> dict:
    return {
        "model_spec": {
            "name": servable.name,
            "signature_name": "",
            "version": str(servable.version),
        },
        "metadata": {"signature_def": {"signature_def": servable.signature_definitions}},
    }


def _indented(document: dict) -> bytes:
    return json.dumps(document, indent=1).encode()


def _error_body(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
