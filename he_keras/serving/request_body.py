"""Reads the body of a request, within limits of size, time and memory."""

import asyncio

from he_keras.serving.request_error import RequestError

# Bodies of this many times the allowed size may be in memory at once.
_BODIES_AT_ONCE = 16


class BodyReader:
    """Reads bodies; counts what all of them hold together.

    Args:
        max_bytes: of one body, unpacked if it came compressed.
        timeout_seconds: for a body to arrive.
    """

    def __init__(self, max_bytes: int, timeout_seconds: float):
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._held_bytes = 0

    async def read(self, request) -> bytes:
        """Returns the body of an aiohttp request, which counts as held until `release`.

        Raises:
            RequestError: 400 if it is broken off or badly packed, 408 if it is slow, 413 if it is
                too large, 503 if all bodies together are.
        """
        declared = request.content_length or 0
        if declared > self._max_bytes:
            raise self._too_large(declared)
        parts: list[bytes] = []
        await self._collect_in_time(request.content, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self, body: bytes) -> None:
        """Takes note that a body is not in memory any more."""
        self._held_bytes -= len(body)

    async def _collect_in_time(self, stream, parts: list[bytes]) -> None:
        if stream.is_eof():
            # All there already, as most are: a timer would cost more than the reading.
            await self._collect(stream, parts)
            return
        try:
            await asyncio.wait_for(self._collect(stream, parts), self._timeout_seconds)
        except asyncio.TimeoutError as error:
            raise RequestError(
                408, f"The body did not arrive within {self._timeout_seconds:g} seconds"
            ) from error

    async def _collect(self, stream, parts: list[bytes]) -> None:
        try:
            await self._collect_within_memory(stream, parts)
        except BaseException:
            # At once: until it is done, every other body that goes on would be refused as well.
            self._held_bytes -= sum(map(len, parts))
            parts.clear()
            raise

    async def _collect_within_memory(self, stream, parts: list[bytes]) -> None:
        from aiohttp import ClientError, http_exceptions, web

        size = 0
        try:
            while part := await stream.readany():
                parts.append(part)
                size += len(part)
                self._held_bytes += len(part)
                if size > self._max_bytes:
                    raise self._too_large(size)
                if self._held_bytes > _BODIES_AT_ONCE * self._max_bytes:
                    raise RequestError(503, "Too many large requests at once; try again")
        except (
            OSError,
            ClientError,
            web.RequestPayloadError,
            http_exceptions.HttpProcessingError,
        ) as error:
            raise RequestError(400, "The body is broken off or badly packed") from error

    def _too_large(self, size: int) -> RequestError:
        return RequestError(
            413, f"Expected a body of at most {self._max_bytes} bytes; received {size} or more"
        )
