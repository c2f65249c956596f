"""A search of several processes: signs of life, the chief's server, the workers' connection.

The protocol is keras-tuner's own, and so are the environment variables. Its server loop is not
used: it looks for the end every 20 seconds, and never ends where a worker was lost.
"""

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

HEARTBEAT = "heartbeat"
_HEARTBEATS_PER_TIMEOUT = 6
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
# A call that loses its connection is made again: every call of the protocol may be repeated.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "1s",
                "maxBackoff": "10s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def address() -> str:
    """Returns where the chief listens."""
    return f"{os.environ['KERASTUNER_ORACLE_IP']}:{os.environ['KERASTUNER_ORACLE_PORT']}"


@contextlib.contextmanager
def heartbeat(folder: pathlib.Path, timeout_seconds: float) -> Iterator[None]:
    """Touches a file in the trial's folder, so that the chief knows that its worker lives."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            # A disk that is full for a moment is no reason to stop.
            with contextlib.suppress(OSError):
                (folder / HEARTBEAT).touch()
            if ended.wait(timeout_seconds / _HEARTBEATS_PER_TIMEOUT):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def serve(oracle) -> None:
    """Answers the workers until there is nothing left to do and they have gone."""
    import grpc
    from keras_tuner.src import protos
    from keras_tuner.src.distribute.oracle_chief import OracleServicer

    # Otherwise a second chief on this machine would share the port, and the workers.
    alone = [("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1), options=alone)
    servicer = OracleServicer(oracle)
    protos.get_service_grpc().add_OracleServicer_to_server(servicer, server)
    try:
        port = server.add_insecure_port(address())
    except RuntimeError:
        port = 0
    if not port:
        raise OSError(
            "The chief cannot listen; expected a free port of this machine; received "
            f"KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT={address()}"
        )
    server.start()
    try:
        while not (servicer.stop_triggered and oracle.has_been_left()):
            time.sleep(_POLL_SECONDS)
    finally:
        server.stop(_GRACE_SECONDS).wait()


def connect(client, is_over: Callable[[], bool]) -> bool:
    """Connects a worker to the chief, however long that takes; False if the search is over."""
    import grpc
    from keras_tuner.src import protos

    options = [("grpc.service_config", json.dumps(_RETRIES)), ("grpc.enable_retries", 1)]
    channel = grpc.insecure_channel(address(), options)
    client.stub = protos.get_service_grpc().OracleStub(channel)
    while not is_over():
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=_POLL_SECONDS)
            return True
    return False
