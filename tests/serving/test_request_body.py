"""The memory that bodies hold together: refusing some must make room for the others."""

import asyncio
import types

import pytest

from he_keras.serving.request_body import BodyReader
from he_keras.serving.request_error import RequestError

MAX_BYTES = 100
CLIENTS = 60


class HerdStream:
    """A body whose parts arrive with those of all other clients, and then its end."""

    def __init__(self, *gates):
        self._gates = list(gates)

    def is_eof(self):
        return False

    async def readany(self):
        await self._gates.pop(0).wait()
        # 60 first parts are 1,560 bytes of the 1,600 that may be held, 60 second parts far more.
        return b"x" * 26 if self._gates else b""


async def results_of_a_herd(reader):
    gates = [asyncio.Event() for _ in range(3)]
    requests = [
        types.SimpleNamespace(content_length=MAX_BYTES, content=HerdStream(*gates), headers={})
        for _ in range(CLIENTS)
    ]
    tasks = [asyncio.ensure_future(reader.read(request)) for request in requests]
    for gate in gates:
        gate.set()  # wakes all of them in one iteration of the loop
        for _ in range(100):
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_refusing_one_body_makes_room_for_the_next():
    """All 60 were refused: the first refusal gave its memory back only after the last had asked."""
    reader = BodyReader(MAX_BYTES, timeout_seconds=1000.0)
    results = asyncio.run(results_of_a_herd(reader))
    refused = [result for result in results if isinstance(result, RequestError)]
    assert {result.status for result in refused} == {503}
    # 30 bodies of 52 bytes fill the 1,600: about so many stay.
    assert 29 <= results.count(b"x" * 52) == CLIENTS - len(refused) <= 31


@pytest.mark.parametrize("size, status", [(MAX_BYTES + 1, 413), (MAX_BYTES // 2, 408)])
def test_refused_bodies_hold_nothing(size, status):
    """16 bodies' worth of refused ones, several times over, leave room for a good one."""

    async def run():
        reader = BodyReader(MAX_BYTES, timeout_seconds=0.01)
        for _ in range(64):
            stream = asyncio.StreamReader()
            stream.feed_data(b"x" * size)
            stream.readany = lambda stream=stream: stream.read(2**16)
            stream.is_eof = lambda: False
            request = types.SimpleNamespace(content_length=None, content=stream, headers={})
            with pytest.raises(RequestError) as raised:
                await reader.read(request)
            assert raised.value.status == status
        # The good one may take its time, as on a busy machine.
        reader._timeout_seconds = 1000.0
        stream = asyncio.StreamReader()
        stream.feed_data(b"x" * MAX_BYTES)
        stream.feed_eof()
        stream.readany = lambda: stream.read(2**16)
        stream.is_eof = lambda: True
        return await reader.read(
            types.SimpleNamespace(content_length=None, content=stream, headers={})
        )

    assert asyncio.run(run()) == b"x" * MAX_BYTES
