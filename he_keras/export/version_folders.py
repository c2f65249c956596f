"""Numbered versions of a served model. Each is complete or not there at all.

TensorFlow Serving looks at a folder every few seconds and loads the largest number. So a version is
written to a hidden folder next to its place, which is then renamed. The system refuses to rename a
folder to a number that is taken. So two exporters never share a number.
"""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

import tensorflow as tf

from he_keras.files import lock_folder
from he_keras.interrupts import KeptInterrupts

_PREFIX = ".partial-"


def write_version(directory, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Writes the next version of a model and returns its folder.

    Ctrl-C before the renaming leaves no files.

    Args:
        directory: the model's folder. Its sub-folders whose names are numbers are the versions.
        write: a function that writes the content into the folder that it is given.

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
            # TensorFlow has an error of its own for a full disk.
            raise OSError(
                "Cannot write the SavedModel; expected room on the disk; received "
                f"{directory}: {error.message}"
            ) from error
        with interrupts.held():
            interrupts.check()
            return _publish(partial, directory)


@contextlib.contextmanager
def _held_folder(directory: pathlib.Path, interrupts: KeptInterrupts) -> Iterator[pathlib.Path]:
    """A new folder, locked while this process lives, and removed unless it was renamed."""
    while True:
        folder = directory / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        # This begins before the folder exists: Ctrl-C may come just after the call that creates it.
        try:
            folder.mkdir()
            with contextlib.ExitStack() as stack:
                # Between the two calls, another exporter may remove it as abandoned.
                with contextlib.suppress(FileNotFoundError):
                    stack.enter_context(lock_folder(folder, wait=True))
                if folder.exists():
                    yield folder
                    return
        finally:
            with interrupts.held():
                shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(directory: pathlib.Path) -> None:
    """Removes what killed exporters have left."""
    for folder in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), lock_folder(folder) as is_held:
            # Without locks, nobody knows whether its exporter lives.
            if is_held:
                shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: pathlib.Path) -> None:
    """Waits until everything has reached the disk. Only then may it turn out to be full."""
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
