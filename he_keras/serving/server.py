"""Runs the server: address, models, signals."""

import asyncio
import logging
import pathlib
import signal
import socket
from collections.abc import Callable

from he_keras.serving.application import Application
from he_keras.serving.batching import Batcher
from he_keras.serving.metrics import Metrics
from he_keras.serving.repository import Repository
from he_keras.serving.settings import ServingSettings

_BACKLOG = 1024
_KEEP_ALIVE_SECONDS = 75.0


def serve(
    models: dict[str, str | pathlib.Path],
    settings: ServingSettings | None = None,
    on_ready: Callable[[str, dict[str, int]], None] | None = None,
) -> None:
    """Serves models until SIGTERM or SIGINT, then finishes what is in flight and returns.

    Args:
        models: folder of each model by the name that URLs use; a folder holds the versions,
            `<folder>/<version>/saved_model.pb`.
        settings: address and limits.
        on_ready: called with the server's URL and the version of each model when it listens.

    Raises:
        ValueError: for a folder without a version that loads, or if the extra is not installed.
        OSError: if the address is taken.

    Example:
        >>> # serve({"cifar10": "serving/cifar10"}, ServingSettings(port=8501))
    """
    settings = settings or ServingSettings()
    _check_installed()
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
    """Takes the address before any work, without listening: clients are refused until then."""
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
    runner = await _listen(application, settings, listener)
    repository.start_polling(settings.poll_seconds)
    host, port = listener.getsockname()[:2]
    if on_ready:
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", repository.versions())
    await stopping.wait()
    logging.getLogger("he_keras.serving").info("Stopping: finishing what is in flight")
    application.is_stopping = True
    repository.stop()
    await runner.cleanup()
    batcher.stop()


async def _listen(application: Application, settings: ServingSettings, listener: socket.socket):
    from aiohttp import web

    # The library logs every broken request with its traceback: anyone could fill the disk.
    quiet = logging.getLogger("he_keras.serving.http")
    quiet.setLevel(logging.CRITICAL)
    server = web.Server(
        application.handle,
        logger=quiet,
        # A request whose client has gone does not reach the model.
        handler_cancellation=True,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        access_log=None,
    )
    # Reading and computing have this much each, so nothing in flight is cut off.
    runner = web.ServerRunner(server, shutdown_timeout=2 * settings.timeout_seconds + 1)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    return runner
