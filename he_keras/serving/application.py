"""Answers requests: TensorFlow Serving's paths, health and metrics."""

import asyncio
import json
import logging
import re
import time
import urllib.parse

from he_keras.serving import image_size
from he_keras.serving.batching import Batcher
from he_keras.serving.predict_format import PredictRequest, format_answer, parse_request
from he_keras.serving.repository import Model, Repository
from he_keras.serving.request_body import BodyReader
from he_keras.serving.request_error import RequestError, shown
from he_keras.serving.servable import Servable
from he_keras.serving.settings import ServingSettings

_LOGGER = logging.getLogger("he_keras.serving")
# Parsing a larger body takes more than a moment, in which the loop should answer others.
_INLINE_BYTES = 64 * 1024
_MODEL = r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_PATHS = {
    "POST": re.compile(_MODEL + r":(?P<verb>classify|regress|predict)", re.ASCII | re.IGNORECASE),
    "GET": re.compile(_MODEL + r"(?:/(?P<verb>metadata))?", re.ASCII | re.IGNORECASE),
}
_JSON = "application/json"


class Application:
    """The handler of every request.

    Args:
        repository: the models.
        batcher: runs them.
        metrics: told about every answer.
        settings: the limits.

    Attributes:
        is_stopping: set when the server goes down, so that /readyz says so.
    """

    def __init__(
        self, repository: Repository, batcher: Batcher, metrics, settings: ServingSettings
    ):
        self._repository = repository
        self._batcher = batcher
        self._metrics = metrics
        self._settings = settings
        self._bodies = BodyReader(settings.max_body_bytes, settings.timeout_seconds)
        # One body at a time: a parsed body is many times the size of its text.
        self._large_bodies = asyncio.Semaphore(1)
        self.is_stopping = False

    async def handle(self, request):
        """Answers one request of aiohttp; every error becomes `{"error": message}`."""
        from aiohttp import web

        model_name, status, headers = "", 200, {"Content-Type": _JSON}
        path = request.rel_url.raw_path
        try:
            if path[:4].lower() == "/v1/":
                match = self._match(request.method, path)
                if match["name"] in self._repository:
                    model_name = match["name"]
                body = await self._answer(match, request)
            else:
                body, headers = self._answer_about_server(request.method, path)
        except RequestError as error:
            status, body = error.status.value, _error_body(str(error))
            headers |= {"Retry-After": "1"} if status == 503 else {}
        # The last line of defence: one request must never take the server down.
        except Exception:
            _LOGGER.exception("Cannot answer %s %s", request.method, path[:200])
            status, body = 500, _error_body("Internal error; the server's log says why")
        self._metrics.count_request(model_name, status)
        return web.Response(status=status, body=body, headers=headers)

    def _match(self, method: str, path: str) -> dict:
        pattern = _PATHS.get(method)
        match = pattern.fullmatch(path) if pattern else None
        if match is None:
            raise RequestError(400, f"Malformed request: {method[:20]} {path[:200]}")
        parts = match.groupdict()
        parts["name"] = urllib.parse.unquote(parts["name"])
        if parts["label"] is not None:
            raise RequestError(400, f"Unrecognized servable version label: {shown(parts['label'])}")
        # More digits than any version has; `int` refuses thousands of them.
        if len(parts["version"] or "") > 19:
            raise RequestError(400, "Failed to convert version to numeric")
        return parts

    async def _answer(self, match: dict, request) -> bytes:
        model = self._repository.model(match["name"])
        version = None if match["version"] is None else int(match["version"])
        verb = (match["verb"] or "").lower()
        if verb == "predict":
            began = time.perf_counter()
            try:
                return await self._predict(model, version, request)
            finally:
                self._metrics.observe_request(model.name, time.perf_counter() - began)
        if verb == "metadata":
            return _indented(_metadata(model.servable(version)))
        if verb:
            raise RequestError(400, f"Only predict is served; received {verb}")
        return _indented(model.status(version))

    async def _predict(self, model: Model, version: int | None, request) -> bytes:
        with model.servable(version).in_use() as servable:
            body = await self._bodies.read(request)
            try:
                parsed = await self._parsed(servable, body)
            finally:
                self._bodies.release(body)
            outputs = await self._batcher.run(servable, parsed.signature_name, parsed.arrays)
        return format_answer(outputs, parsed.in_rows)

    async def _parsed(self, servable: Servable, body: bytes) -> PredictRequest:
        if len(body) <= _INLINE_BYTES:
            return self._parse(servable, body)
        async with self._large_bodies:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, self._parse, servable, body)

    def _parse(self, servable: Servable, body: bytes) -> PredictRequest:
        parsed = parse_request(body, lambda name: servable.signature(name).inputs)
        inputs = servable.signature(parsed.signature_name).inputs
        image_size.check_images(parsed.arrays, inputs, self._settings.max_image_pixels)
        return parsed

    def _answer_about_server(self, method: str, path: str) -> tuple[bytes, dict[str, str]]:
        if path not in ("/healthz", "/readyz", "/metrics"):
            raise RequestError(404, f"Not found: {path[:200]}")
        if method not in ("GET", "HEAD"):
            raise RequestError(405, f"Malformed request: {method[:20]} {path}")
        if path == "/metrics":
            body, content_type = self._metrics.text()
            return body, {"Content-Type": content_type}
        is_ready = self._repository.is_complete and not self.is_stopping
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
