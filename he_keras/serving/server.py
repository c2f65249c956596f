"""Starts and stops the server."""

import asyncio
import logging
import pathlib
import resource
import signal
import socket
from collections.abc import Callable

from he_keras.serving.application import Application
from he_keras.serving.batching import Batcher
from he_keras.serving.connections import Connections
from he_keras.serving.metrics import Metrics
from he_keras.serving.repository import Repository
from he_keras.serving.settings import ServingSettings

#: Connections that the system keeps waiting until they are accepted; more are refused or retried by
#: the system. Chosen: above any burst of clients that one process can answer.
_BACKLOG = 1024
# How many of the waiting connections are accepted at a time. In between, connections that lost
# their places are closed.
_ACCEPTED_AT_ONCE = 16
# Open files that are not connections: models, logs, libraries.
_OTHER_FILES = 128


def serve(
    models: dict[str, str | pathlib.Path],
    settings: ServingSettings | None = None,
    on_ready: Callable[[str, dict[str, int]], None] | None = None,
) -> None:
    """Serves models until SIGTERM or SIGINT. Then it answers open requests and returns.

    Args:
        models: the folder of each model, by the name that URLs use. A folder holds versions,
            `<folder>/<version>/saved_model.pb`.
        settings: address and limits.
        on_ready: a function that is called when the server listens, with its URL and the version of
            each model.

    Raises:
        ValueError: A folder has no version that loads, or the extra is not installed.
        OSError: The address is taken.

    Example:
        >>> # serve({"cifar10": "serving/cifar10"}, ServingSettings(port=8501))
    """
    settings = settings or ServingSettings()
    _check_installed()
    _check_open_files(settings.max_connections)
    folders = _checked_folders(models)
    with _bound_socket(settings.host, settings.port) as listener:
        asyncio.run(_run(folders, settings, listener, on_ready))


def _check_installed() -> None:
    try:
        import aiohttp  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import simdjson  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "A library is missing; expected the extra, pip install he_keras[serve]; "
            f"received {error}"
        ) from error


def _check_open_files(max_connections: int) -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ValueError(
            f"Too few open files are allowed; expected {needed} for {max_connections} connections; "
            f"received {allowed}: run ulimit -n {needed}, or lower max_connections"
        )


def _checked_folders(models) -> dict[str, pathlib.Path]:
    if not models:
        raise ValueError("No model to serve; expected at least one folder; received none")
    folders = {name: pathlib.Path(folder) for name, folder in models.items()}
    for name, folder in folders.items():
        if not name or set(name) & set("/:"):
            raise ValueError(
                f"Invalid name of a model; expected no slash and no colon; received {name!r}"
            )
        if (folder / "saved_model.pb").exists():
            raise ValueError(
                f"A version is not a model; expected its parent folder; received {folder}"
            )
        try:
            list(folder.iterdir())
        except OSError as error:
            raise ValueError(
                f"Cannot read a model; expected a folder of versions; received {folder}: "
                f"{error.strerror}"
            ) from error
    return folders


def _bound_socket(host: str, port: int) -> socket.socket:
    """Takes the address before any work. Clients are refused until the server listens."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"Cannot listen; expected a free address; received {host}:{port}: {error.strerror}"
        ) from error
    return listener


async def _run(folders, settings: ServingSettings, listener: socket.socket, on_ready) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    metrics = Metrics()
    repository = Repository(folders, settings.max_batch_size, metrics)
    await loop.run_in_executor(None, repository.load)
    if stopping.is_set():
        return
    batcher = Batcher(settings, metrics)
    application = Application(repository, batcher, metrics, settings)

    def listening() -> None:
        repository.start_polling(settings.poll_seconds)
        host, port = listener.getsockname()[:2]
        if on_ready:
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", repository.versions())

    await answer_until(stopping, application, settings, listener, listening)
    repository.stop()
    batcher.stop()


async def answer_until(
    stopping: asyncio.Event,
    application: Application,
    settings: ServingSettings,
    listener: socket.socket,
    on_listening: Callable[[], None],
) -> None:
    """Answers requests until an event; then refuses new ones, and returns after the last answer.

    Args:
        stopping: the event.
        application: answers.
        settings: the limits.
        listener: a bound socket.
        on_listening: called once clients can connect.
    """
    from aiohttp import web

    # The library logs every broken request with its traceback: anyone could fill the disk.
    quiet = logging.getLogger("he_keras.serving.http")
    quiet.setLevel(logging.CRITICAL)
    server = web.Server(
        application.handle,
        logger=quiet,
        # A request whose client has gone does not reach the model.
        handler_cancellation=True,
        access_log=None,
        # What a packed body unpacks to is bounded where it is read. The library, which throws the
        # rest of a refused body away, would unpack all of it.
        auto_decompress=False,
    )
    # Reading and computing have this much each, so nothing in flight is cut off.
    in_flight_seconds = 2 * settings.timeout_seconds + 1
    runner = web.ServerRunner(server, shutdown_timeout=in_flight_seconds)
    await runner.setup()
    connections = Connections(server, settings)
    loop = asyncio.get_running_loop()
    site = await loop.create_server(connections, sock=listener, backlog=_ACCEPTED_AT_ONCE)
    listener.listen(_BACKLOG)
    watch = asyncio.ensure_future(connections.watch())
    on_listening()
    await stopping.wait()
    logging.getLogger("he_keras.serving").info("Stopping: finishing what is in flight")
    await application.drain(in_flight_seconds)
    watch.cancel()
    site.close()
    await runner.cleanup()
