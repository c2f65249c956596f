"""Limits how long a connection may send half a request, and how many connections there are."""

import asyncio
import math

from he_keras.serving.settings import ServingSettings

#: How long an idle connection stays open for the next request: chosen.
_KEEP_ALIVE_SECONDS = 75.0
#: How long the last bytes may take to leave before the connection is cut: chosen.
_CLOSING_SECONDS = 1.0
# What has arrived of a request: nothing yet, a part of its head, a part of its body, or all of it,
# so that an answer is due.
_IDLE, _HEAD, _BODY, _ANSWER, _CLOSING = range(5)
_SLOW_HEAD = "The head of the request did not arrive in time"
_TOO_MANY = "Too many connections; try again"


def connection_of(request) -> "Connection | None":
    """Returns the connection that an aiohttp request came through, or None if it has closed."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None


class Connections:
    """Creates the protocol of each connection, and closes connections that are too slow.

    The time limit of a body is kept where the body is read. If all places are taken, the connection
    that has sent no whole request for the longest time is closed. So clients that never finish a
    request can only push out one another.

    Args:
        server: creates aiohttp's protocol.
        settings: the limits.
    """

    def __init__(self, server, settings: ServingSettings):
        self._server = server
        self._max_connections = settings.max_connections
        self.header_seconds = settings.header_timeout_seconds
        self._open: set[Connection] = set()

    def __call__(self) -> "Connection":
        """Creates the protocol of a new connection."""
        return Connection(self, self._server())

    async def watch(self) -> None:
        """Closes connections whose time is over, until this task is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.header_seconds / 4))
            now = asyncio.get_running_loop().time()
            for connection in [each for each in self._open if each.deadline <= now]:
                connection.expire(now)

    def enter(self, connection: "Connection") -> bool:
        """Gives a new connection a place, and returns whether there was one."""
        if len(self._open) >= self._max_connections:
            waiting = [each for each in self._open if each.state != _ANSWER]
            if not waiting:
                return False
            oldest = min(waiting, key=lambda each: each.since)
            self.leave(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        return True

    def leave(self, connection: "Connection") -> None:
        """Frees the place of a connection."""
        self._open.discard(connection)


class Connection(asyncio.Protocol):
    """One connection. It passes everything on to aiohttp's protocol and keeps the time limits.

    Attributes:
        state: what has arrived of the current request.
        since: when this state began.
        deadline: when this state must have ended.
        transport: the socket.
    """

    transport: asyncio.Transport

    def __init__(self, connections: Connections, inner: asyncio.Protocol):
        self._connections = connections
        self._inner: asyncio.Protocol | None = inner
        self._time = asyncio.get_running_loop().time
        self._enters(_IDLE, connections.header_seconds)

    def _enters(self, state: int, seconds: float) -> None:
        self.state, self.since = state, self._time()
        self.deadline = self.since + seconds

    def body_begins(self) -> None:
        """Notes that the head of a request has arrived."""
        self._enters(_BODY, math.inf)

    def answer_is_due(self) -> None:
        """Notes that the whole request has arrived. From now on, the client is not at fault."""
        self._enters(_ANSWER, math.inf)

    def ends(self) -> None:
        """Notes that the request is answered."""
        self._enters(_IDLE, _KEEP_ALIVE_SECONDS)

    def expire(self, now: float) -> None:
        """Closes the connection. If a part of a request has arrived, the client is told why."""
        if self.state == _CLOSING or self.transport.get_write_buffer_size():
            # The client does not read its answer.
            self.transport.abort()
            return
        if self.state == _HEAD:
            self.transport.write(_answer(b"408 Request Timeout", _SLOW_HEAD))
        self._enters(_CLOSING, _CLOSING_SECONDS)
        self.transport.close()

    def connection_made(self, transport) -> None:
        """Takes a place, or refuses the connection if there is none."""
        self.transport = transport
        if not self._connections.enter(self):
            self._inner = None
            transport.write(_answer(b"503 Service Unavailable", _TOO_MANY))
            transport.close()
            return
        if self._inner is not None:
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Begins the time limit of a head with its first byte. Further bytes do not renew it."""
        if self.state == _IDLE:
            self._enters(_HEAD, self._connections.header_seconds)
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Passes it on."""
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        """Passes it on."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Passes it on."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Frees the place."""
        self._connections.leave(self)
        if self._inner is not None:
            self._inner.connection_lost(error)


def _answer(status: bytes, message: str) -> bytes:
    body = b'{"error": "%b"}' % message.encode()
    return (
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        b"Connection: close\r\n\r\n%b" % (status, len(body), body)
    )
