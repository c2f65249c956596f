"""Numbered versions of a served model, each complete or not there at all.

TensorFlow Serving looks at a folder every few seconds and loads the largest number. So a version is
written under a dot-name beside its place and renamed. The number is chosen by the renaming itself,
which the system refuses where somebody else was faster: two exporters never share one.
"""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

import tensorflow as tf

from he_keras.export.kept_interrupts import KeptInterrupts

_PREFIX = ".partial-"


def write_version(directory, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Writes the next version of a model and returns its folder.

    Ctrl-C before the renaming leaves nothing, wherever it strikes.

    Args:
        directory: the model's folder; its versions are the names that are numbers.
        write: writes the content into the folder that it is given.

    Example:
        >>> import pathlib, tempfile
        >>> from he_keras.export.version_folders import write_version
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     write = lambda folder: folder.joinpath("saved_model.pb").touch()
        ...     [write_version(directory, write).name for _ in range(2)]
        ['1', '2']
    """
    directory = pathlib.Path(directory)
    with KeptInterrupts() as interrupts, contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(directory)
            partial = stack.enter_context(_held_folder(directory, interrupts))
        except OSError as error:
            raise ValueError(
                "Cannot write the SavedModel; expected a writable folder; received "
                f"{directory}: {error}"
            ) from error
        try:
            write(partial)
            _flush(partial)
        except tf.errors.OpError as error:
            # TensorFlow has errors of its own for a full disk.
            raise OSError(
                "Cannot write the SavedModel; expected room on the disk; received "
                f"{directory}: {error.message}"
            ) from error
        with interrupts.held():
            interrupts.check()
            return _publish(partial, directory)


@contextlib.contextmanager
def _held_folder(directory: pathlib.Path, interrupts: KeptInterrupts) -> Iterator[pathlib.Path]:
    """A new folder that others leave alone while this process lives; removed unless renamed."""
    while True:
        folder = directory / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        # From before it is there: Ctrl-C may strike right behind the call that makes it.
        try:
            folder.mkdir()
            with contextlib.ExitStack() as stack:
                # Between the calls somebody may take it for an abandoned one, and remove it.
                with contextlib.suppress(FileNotFoundError):
                    stack.enter_context(_lock(folder))
                if folder.exists():
                    yield folder
                    return
        finally:
            with interrupts.held():
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: pathlib.Path, wait: bool = True) -> Iterator[None]:
    """Holds a folder; the system frees it when the process ends, however that happens.

    Raises a BlockingIOError if it is held and `wait` is False. Where the operating system has no
    such locks (Windows), every folder counts as held.
    """
    try:
        import fcntl
    except ImportError:
        if not wait:
            raise BlockingIOError from None
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _remove_abandoned(directory: pathlib.Path) -> None:
    """Removes what exporters that were killed have left behind."""
    for folder in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _lock(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: pathlib.Path) -> None:
    """Waits until everything has reached the disk, which may turn out to be full only then."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _publish(partial: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    while True:
        taken = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]
        version = directory / str(max(taken, default=0) + 1)
        try:
            os.rename(partial, version)
        except OSError:
            if not version.exists():
                raise
        else:
            return version
