"""A server under pressure, on loopback: halves of requests, too many pixels, its own end.

The model is a stand-in whose runs the tests hold up; sockets, limits and answers are the real ones.
"""

import asyncio
import base64
import contextlib
import json
import logging
import math
import threading

import pytest
import requests
from served_models import encoded_png
from stand_in_server import GOOD, PATH, Running

from he_keras.serving.connections import Connections
from he_keras.serving.metrics import Metrics
from he_keras.serving.repository import Repository
from he_keras.serving.server import serve
from he_keras.serving.settings import ServingSettings

HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()


def all_of(client):
    """What comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(4096):
            parts.append(part)
    return b"".join(parts)


def images_of(count, side=8):
    text = base64.b64encode(encoded_png([[[0]] * side] * side)).decode()
    return {"signature_name": "serve_bytes", "instances": [{"b64": text}] * count}


def test_half_a_head_is_closed_and_others_are_served_meanwhile():
    with Running(header_timeout_seconds=0.3) as server:
        halves = [server.connect() for _ in range(20)]
        for number, client in enumerate(halves):
            client.sendall(HEAD[: number * 2])
        assert server.predict(GOOD).json() == {"predictions": [2.0, 4.0]}
        answers = [all_of(client) for client in halves]
        for client in halves:
            client.close()
    # Who has not sent a byte is not told anything.
    assert answers[0] == b""
    for answer in answers[1:]:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert "did not arrive" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_half_a_body_is_answered_with_408():
    with Running(timeout_seconds=0.3) as server, server.connect() as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert server.predict(GOOD).status_code == 200


@pytest.mark.parametrize("start", [b"", HEAD[:9], HEAD + b"Content-Length: 100\r\n\r\n{"])
def test_halves_only_push_one_another_out(start):
    """With all places taken by halves that have hours, a whole request is served at once."""
    limits = {"header_timeout_seconds": 3600.0, "timeout_seconds": 3600.0, "max_connections": 4}
    with Running(**limits) as server, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(server.connect()) for _ in range(4)]
        for client in halves:
            client.sendall(start)
        for _ in range(3):
            assert requests.get(server.url + "/healthz", timeout=60).status_code == 200
            assert server.predict(GOOD).json() == {"predictions": [2.0, 4.0]}
        assert all_of(halves[0]) == b""
        for client in halves:
            client.close()


def test_connections_that_wait_for_an_answer_keep_their_places():
    with Running(max_connections=2) as server:
        server.model.numbers.gate.clear()
        body = json.dumps(GOOD).encode()
        request = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        first, second = server.connect(), server.connect()
        first.sendall(request)
        second.sendall(request)
        # Whole requests both, once both are in the model or its queue.
        assert server.model.numbers.is_entered.wait(60)
        while True:
            with server.connect() as third:
                third.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if (answer := all_of(third)).startswith(b"HTTP/1.1 503 "):
                    break
        assert b"Too many connections" in answer
        server.model.numbers.gate.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
        first.close()
        second.close()


class FakeTransport:
    def __init__(self, unsent=0):
        self.sent, self.closed, self.unsent = b"", "", unsent

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = "closed"

    def abort(self):
        self.closed = "aborted"

    def get_write_buffer_size(self):
        return self.unsent


class Inner(asyncio.Protocol):
    """aiohttp's part."""


def a_connection(clock, transport, **limits):
    async def made():
        connections = Connections(Inner, ServingSettings(**limits))
        connection = connections()
        connection._time = lambda: clock[0]
        connection.connection_made(transport)
        return connection

    return asyncio.run(made())


def test_further_bytes_of_a_head_do_not_renew_its_time():
    clock, transport = [100.0], FakeTransport()
    connection = a_connection(clock, transport, header_timeout_seconds=10.0)
    connection.data_received(b"P")
    assert connection.deadline == 110.0
    clock[0] = 109.0
    connection.data_received(b"O")
    assert connection.deadline == 110.0
    connection.expire(110.0)
    assert b"408" in transport.sent and transport.closed == "closed"
    connection.expire(connection.deadline)
    assert transport.closed == "aborted"


def test_the_server_may_take_its_time_and_an_idle_client_75_seconds():
    clock, transport = [100.0], FakeTransport()
    connection = a_connection(clock, transport)
    connection.body_begins()
    connection.answer_is_due()
    connection.data_received(b"the next request")
    assert connection.deadline == math.inf
    connection.ends()
    assert connection.deadline == 175.0
    connection.expire(175.0)
    assert transport.sent == b"" and transport.closed == "closed"


def test_who_does_not_read_its_answer_is_cut_off():
    transport = FakeTransport(unsent=1)
    connection = a_connection([0.0], transport)
    connection.ends()
    connection.expire(75.0)
    assert transport.closed == "aborted"


def test_a_request_has_a_budget_of_pixels():
    limits = {"max_image_pixels": 64, "max_request_pixels": 200}
    with Running(**limits) as server:
        assert server.predict(images_of(3)).status_code == 200
        answer = server.predict(images_of(4))
        assert answer.status_code == 413
        assert "have 256 pixels; expected at most 200 in one request" in answer.json()["error"]
        assert server.predict(images_of(1, side=9)).status_code == 400
        assert server.model.images.sizes == [3]


def test_many_requests_together_have_that_budget_for_each_run_and_16_of_them_in_the_queue():
    limits = {"max_image_pixels": 64, "max_request_pixels": 128, "batch_timeout_ms": 0}
    with Running(**limits) as server:
        images = server.model.images
        images.gate.clear()
        answers, is_answered = [], threading.Semaphore(0)

        def ask():
            answers.append(server.predict(images_of(2)).status_code)
            is_answered.release()

        threads = [threading.Thread(target=ask) for _ in range(20)]
        threads[0].start()
        assert images.is_entered.wait(60)
        for thread in threads[1:]:
            thread.start()
        # One is in the model, 16 wait, and three are told to come back, before any is answered.
        for _ in range(3):
            assert is_answered.acquire(timeout=60)
        assert answers == [503] * 3
        images.gate.set()
        for thread in threads:
            thread.join(60)
    assert sorted(answers) == [200] * 17 + [503] * 3
    assert images.sizes == [2] * 17


def test_draining_says_not_ready_and_finishes_what_is_in_flight():
    with Running() as server:
        numbers = server.model.numbers
        numbers.gate.clear()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.predict(GOOD)))
        asking.start()
        assert numbers.is_entered.wait(60)
        assert requests.get(server.url + "/readyz", timeout=60).status_code == 200
        server.begin_to_stop()
        while requests.get(server.url + "/readyz", timeout=60).status_code == 200:
            pass
        assert requests.get(server.url + "/healthz", timeout=60).status_code == 200
        refused = server.predict(GOOD)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]
        assert refused.headers["Connection"] == "close" and "Retry-After" in refused.headers
        numbers.gate.set()
        asking.join(60)
        assert answers[0].json() == {"predictions": [2.0, 4.0]}
        server.thread.join(60)
        with pytest.raises(ConnectionRefusedError):
            server.connect()


class FailingModel:
    """A model whose folder cannot be looked at for a while."""

    current = None

    def __init__(self, name, failures):
        self.name, self.failures, self.looks = name, failures, 0
        self.is_refreshed = threading.Event()

    def refresh(self):
        self.looks += 1
        if self.looks <= self.failures:
            raise MemoryError("no room")
        self.is_refreshed.set()


def test_what_nobody_foresaw_does_not_end_the_reloading(caplog):
    repository = Repository({}, 1, Metrics())
    first, second = FailingModel("first", 3), FailingModel("second", 0)
    repository._models = {"first": first, "second": second}
    with caplog.at_level(logging.ERROR, "he_keras.serving"):
        repository.start_polling(0.001)
        assert first.is_refreshed.wait(60) and second.is_refreshed.wait(60)
        repository.stop()
        repository._poller.join(60)
    logged = [record for record in caplog.records if "Cannot look" in record.message]
    assert len(logged) == 1 and "no room" in logged[0].exc_text


def test_more_connections_than_files_are_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="expected 1000000128 for 1000000000 connections"):
        serve({"m": tmp_path}, ServingSettings(max_connections=10**9))


def test_a_request_must_hold_an_image():
    with pytest.raises(ValueError, match="max_request_pixels >= 100"):
        ServingSettings(max_image_pixels=100, max_request_pixels=99)
