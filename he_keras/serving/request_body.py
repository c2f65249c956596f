"""Reads the bodies of requests, within limits of size, time and memory."""

import asyncio
import zlib

from he_keras.serving.request_error import RequestError

# Bodies of this many times the allowed size may be in memory at once.
_BODIES_AT_ONCE = 16


class _Plain:
    """A body that is not packed."""

    is_whole = True

    def unpack(self, data: bytes, limit: int) -> bytes:
        return data


class _Packed:
    """A body packed by gzip or deflate; some clients write deflate without its header."""

    def __init__(self, encoding: str):
        self._encoding = encoding
        self._unpacker: zlib._Decompress | None = None

    def unpack(self, data: bytes, limit: int) -> bytes:
        """Unpacks a part of the body, and returns at most `limit` bytes."""
        if self._unpacker is None:
            has_header = self._encoding == "gzip" or data[0] & 0xF == zlib.DEFLATED
            gzip_bits = 16 if self._encoding == "gzip" else 0
            bits = gzip_bits + zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
            self._unpacker = zlib.decompressobj(wbits=bits)
        return self._unpacker.decompress(data, limit)

    @property
    def is_whole(self) -> bool:
        """Whether the packed data ended exactly with the body, or the body was empty."""
        unpacker = self._unpacker
        return unpacker is None or (unpacker.eof and not unpacker.unused_data)


def _unpacking(request) -> "_Plain | _Packed":
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return _Plain()
    if encoding in ("gzip", "deflate"):
        return _Packed(encoding)
    raise RequestError(
        400, f"Expected a body packed by gzip, deflate or nothing; received {encoding[:40]!r}"
    )


class BodyReader:
    """Reads bodies, and counts the bytes of all bodies that are in memory.

    Args:
        max_bytes: the most bytes of one body after unpacking.
        timeout_seconds: how long a body may take to arrive.
    """

    def __init__(self, max_bytes: int, timeout_seconds: float):
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._held_bytes = 0

    async def read(self, request) -> bytes:
        """Returns the body of an aiohttp request, which counts as held until `release`.

        Raises:
            RequestError: 400 if the body is incomplete or badly packed, 408 if it is slow, 413 if
                it is too large, 503 if all bodies together are too large.
        """
        packing, declared = _unpacking(request), request.content_length or 0
        if declared > self._max_bytes:
            raise self._too_large(declared)
        parts: list[bytes] = []
        await self._collect_in_time(request.content, packing, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self, body: bytes) -> None:
        """Notes that a body is no longer in memory."""
        self._held_bytes -= len(body)

    async def _collect_in_time(self, stream, packing, parts: list[bytes]) -> None:
        if stream.is_eof():
            # Most bodies have already arrived. A timer would cost more than reading them.
            await self._collect(stream, packing, parts)
            return
        try:
            await asyncio.wait_for(self._collect(stream, packing, parts), self._timeout_seconds)
        except asyncio.TimeoutError as error:
            raise RequestError(
                408, f"The body did not arrive within {self._timeout_seconds:g} seconds"
            ) from error

    async def _collect(self, stream, packing, parts: list[bytes]) -> None:
        try:
            await self._collect_within_memory(stream, packing, parts)
        except BaseException:
            # Immediately: as long as these bytes count, every other body may be refused as well.
            self._held_bytes -= sum(map(len, parts))
            parts.clear()
            raise

    async def _collect_within_memory(self, stream, packing, parts: list[bytes]) -> None:
        from aiohttp import ClientError, http_exceptions, web

        size = 0
        try:
            while packed := await stream.readany():
                part = packing.unpack(packed, self._max_bytes + 1 - size)
                parts.append(part)
                size += len(part)
                self._held_bytes += len(part)
                if size > self._max_bytes:
                    raise self._too_large(size)
                if self._held_bytes > _BODIES_AT_ONCE * self._max_bytes:
                    raise RequestError(503, "Too many large requests at once; try again")
            if not packing.is_whole:
                raise zlib.error("incomplete")
        except (
            OSError,
            zlib.error,
            ClientError,
            web.RequestPayloadError,
            http_exceptions.HttpProcessingError,
        ) as error:
            raise RequestError(400, "The body is incomplete or badly packed") from error

    def _too_large(self, size: int) -> RequestError:
        return RequestError(
            413, f"Expected a body of at most {self._max_bytes} bytes; received {size} or more"
        )
