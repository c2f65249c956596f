"""Files that are complete or not there at all, whenever the program is killed; and file locks.

Every writer has a temporary file of its own. So several processes may write one file at the same
moment: the last one wins, and none fails.

The system frees a lock when its process ends, even if that was killed. Not every system and not
every file system has locks. Without them nothing is held, and nobody is told that another process
holds it. The package `filelock` promises less, so it is not used. Its file lock cannot be shared;
its shared lock is an SQLite database, which NFS does not lock reliably. Where there are no locks it
falls back on the mere presence of a file, which outlives a killed process.
"""

import contextlib
import json
import os
import pathlib
import re
import uuid
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from he_keras.arguments import suggestion


@contextlib.contextmanager
def lock(path, shared: bool = False, wait: bool = False) -> Iterator[bool]:
    """Locks a file. It is created if it is missing, and it stays: others may be waiting for it.

    Yields whether the lock is held, which is False where there are no locks. Raises a
    BlockingIOError if another process holds the lock and `wait` is False.

    Args:
        path: the lock file.
        shared: several processes may hold the lock, if all of them share it.
        wait: wait until the lock is free.

    Example:
        >>> import tempfile
        >>> from he_keras.files import lock
        >>> with tempfile.TemporaryDirectory() as folder, lock(f"{folder}/.lock") as is_held:
        ...     with lock(f"{folder}/.lock"):
        ...         pass
        Traceback (most recent call last):
        BlockingIOError: ...
    """
    # NFS locks only a file that is open for reading (a shared lock) or for writing (any other).
    with open(path, "a+") as file:
        yield lock_open_file(file.fileno(), shared, wait)


@contextlib.contextmanager
def lock_folder(folder, wait: bool = False) -> Iterator[bool]:
    """Locks a folder without creating a file in it. Otherwise it does what `lock` does."""
    if os.name == "nt":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock_open_file(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def lock_open_file(descriptor: int, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file until it is closed, and returns whether it could; see `lock`."""
    try:
        import fcntl
    except ImportError:
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path next to `path`, with its suffix; renames it if nothing was raised.

    It also removes what killed writers of the same file have left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    with _temporary_file(path) as temporary:
        try:
            yield temporary
        except OSError as error:
            # Where the disk is full, Python does not say which file was written.
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        os.replace(temporary, path)


@contextlib.contextmanager
def _temporary_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new file, locked while this process lives, and removed unless it was renamed."""
    while True:
        name = f"partial-{os.getpid()}-{uuid.uuid4().hex[:12]}-{path.name}"
        temporary = path.with_name(name)
        try:
            with open(temporary, "x+") as file:
                if not lock_open_file(file.fileno(), wait=True):
                    # Windows, which has no such locks, renames no file that is open.
                    file.close()
                # Before it was locked, another writer may have removed it as abandoned.
                if temporary.exists():
                    yield temporary
                    return
        finally:
            temporary.unlink(missing_ok=True)


def _remove_abandoned(path: pathlib.Path) -> None:
    pattern = re.compile(rf"partial-\d+-[0-9a-f]{{12}}-{re.escape(path.name)}")
    for found in path.parent.iterdir():
        if pattern.fullmatch(found.name):
            # An error says that its writer holds it, or that it has gone.
            with contextlib.suppress(OSError):
                _remove_unless_locked(found)


def _remove_unless_locked(path: pathlib.Path) -> None:
    with open(path, "r+") as file:
        # Without locks, nobody knows whether its writer lives.
        if lock_open_file(file.fileno()):
            path.unlink()


def write_json(path: pathlib.Path, content) -> None:
    """Writes plain data as JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: pathlib.Path, expected: str = "a file written by a run") -> dict[str, Any]:
    """Reads an object of plain data.

    Args:
        path: the JSON file.
        expected: what the error expects if the file is missing or damaged.

    Raises:
        ValueError: The file cannot be read, is not JSON, or is another kind of data.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, not an object")
    except (OSError, ValueError) as error:
        # The text of an OSError repeats the path.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"Cannot read {path.name}; expected {expected}; received {path}: {reason}"
        ) from error
    return content


def write_npz(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an .npz file that has reached the disk before it takes the name."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        write_arrays(file, arrays)
        file.flush()
        os.fsync(file.fileno())


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of an .npz file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file cannot be read, or is damaged. The text says how, in a few words.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    # An .npy file is read without complaint, but is no context manager.
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        # NumPy's own text would advise to unpickle the file.
        raise ValueError(f"no readable .npz file of arrays ({type(error).__name__})") from error


def write_arrays(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays of any name as an .npz file without pickles.

    `np.savez` refuses some names, and NumPy 1.26 writes its argument `allow_pickle` as an array.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def check_model_exists(path) -> None:
    """Raises a ValueError where there is no file or folder; it suggests one of a similar name."""
    if not pathlib.Path(path).exists():
        raise ValueError(
            "No model; expected an existing .keras file, run folder or SavedModel folder; "
            f"received {path}{beside(path)}"
        )


def beside(path) -> str:
    """The end of an error that suggests a file or folder of a similar name, if there is one."""
    path = pathlib.Path(path)
    names = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    return "" if path.exists() else suggestion(path.name, names)


def make_writable(folder: pathlib.Path, purpose: str) -> pathlib.Path:
    """Creates a folder before the work whose result goes there, or raises a ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        # Another program may have done the same and removed it.
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"Cannot write {purpose}; expected a writable folder; received {folder}: {error}"
        ) from error
    return folder
