"""A search of several processes: signs of life, the chief's end, the workers' connection.

The chief and its workers talk by keras-tuner's own protocol, and find each other by its environment
variables. What is here makes them survive the loss of one another.
"""

import contextlib
import functools
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from he_keras.search.settings import HEARTBEAT

#: Chosen: a worker is lost only if several heartbeats in a row do not come.
_HEARTBEATS_PER_TIMEOUT = 6
#: How often to look whether something has ended: chosen, too short to be noticed.
_POLL_SECONDS = 0.5
#: Pauses before a call that lost its connection is made again.
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)


def address() -> str:
    """Returns where the chief listens."""
    return f"{os.environ['KERASTUNER_ORACLE_IP']}:{os.environ['KERASTUNER_ORACLE_PORT']}"


@contextlib.contextmanager
def heartbeat(folder: pathlib.Path, timeout_seconds: float) -> Iterator[None]:
    """Touches a file in the trial's folder, so that the chief knows that its worker lives."""

    def touch() -> None:
        # A disk that is full for a moment is no reason to stop.
        with contextlib.suppress(OSError):
            (folder / HEARTBEAT).touch()

    touch()
    with _repeating(touch, timeout_seconds / _HEARTBEATS_PER_TIMEOUT):
        yield


@contextlib.contextmanager
def forgetting_lost_workers(oracle) -> Iterator[None]:
    """Lets keras-tuner's chief end although a worker was lost while it waited for a trial."""
    with _repeating(oracle.forget_lost_workers, _POLL_SECONDS):
        yield


@contextlib.contextmanager
def _repeating(work: Callable[[], object], pause_seconds: float) -> Iterator[None]:
    """Does something again and again, in a thread of its own."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(pause_seconds):
            work()

    thread = threading.Thread(target=repeat, daemon=True, name="he_keras.search")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def check_port_is_free() -> None:
    """Raises an OSError if the chief cannot listen at its address.

    gRPC would share a port with a second chief on this machine, and so its workers.
    """
    host, _, port = address().rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError as error:
        raise OSError(
            "The chief cannot listen; expected a free port of this machine; received "
            f"KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT={address()}: {error}"
        ) from error


def wait_for_chief(is_over: Callable[[], bool]) -> bool:
    """Waits until the chief answers, however long that takes; False if the search is over."""
    with grpc.insecure_channel(address()) as channel:
        ready = grpc.channel_ready_future(channel)
        while not is_over():
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(timeout=_POLL_SECONDS)
                return True
        ready.cancel()
    return False


class SearchIsOver(Exception):
    """The chief has left, because the search ended while a worker's call was on its way."""


class PatientOracle:
    """The chief's oracle as a worker sees it: a call that loses the connection is made again.

    Every call of the protocol may be repeated.

    Args:
        client: keras-tuner's connection to the chief.
        is_over: whether the search has ended; then a lost call raises `SearchIsOver`.
    """

    def __init__(self, client, is_over: Callable[[], bool]) -> None:
        self._client = client
        self._is_over = is_over

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable, *args, **kwargs) -> Any:
        for pause_seconds in _RETRY_SECONDS:
            try:
                return method(*args, **kwargs)
            except grpc.RpcError as error:
                code: Any = getattr(error, "code", lambda: None)
                if code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            time.sleep(pause_seconds)
            if self._is_over():
                raise SearchIsOver
        return method(*args, **kwargs)
