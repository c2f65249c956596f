"""Downloads published files, on demand only. What broke off goes on from where it stopped."""

import hashlib
import http.client
import os
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from he_keras.arguments import reason_of
from he_keras.files import lock_open_file
from he_keras.zoo.catalog import ENTRIES
from he_keras.zoo.recipe import Entry

#: Where files are looked for, below the current folder.
FOLDER = "checkpoints"
_CHUNK = 2**20
_TIMEOUT_SECONDS = 60.0
_RANGE_IS_EMPTY = 416

Say = Callable[[str], None]


def local_path(entry: Entry, folder: str | pathlib.Path = FOLDER) -> pathlib.Path:
    """Returns where the file of an entry lies once it is downloaded.

    Args:
        entry: a published file.
        folder: the folder of all downloaded files.

    Example:
        >>> import he_keras as he
        >>> from he_keras.zoo.downloads import local_path
        >>> entry = next(each for each in he.zoo.entries() if each.name == "trades/wrn-34-10")
        >>> local_path(entry).as_posix()
        'checkpoints/trades/wrn-34-10.pt'
    """
    suffix = pathlib.PurePosixPath(entry.file_name).suffix or ".pt"
    return pathlib.Path(folder) / f"{entry.name}{suffix}"


def download(name: str, folder: str | pathlib.Path = FOLDER, say: Say = print) -> pathlib.Path:
    """Downloads the file of an entry, unless it is there, and returns its path.

    An interrupted download leaves a `.part` file. The next call asks the server for the rest.

    Args:
        name: an entry, such as "at_he/wrn-34-20".
        folder: the folder of all downloaded files.
        say: what to do with lines about the progress.

    Raises:
        ValueError: The server does not answer with the file. The message says where to put it.

    Example:
        >>> import he_keras as he
        >>> # he.zoo.download("at_he/wrn-34-20")
    """
    entry = ENTRIES[name]
    path = local_path(entry, folder)
    if not path.exists():
        if entry.address is None:
            raise _by_hand(entry, path, "a folder of files")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        with open(part, "ab") as file:
            try:
                lock_open_file(file.fileno())
            except BlockingIOError:
                raise ValueError(
                    f"Another process downloads this file; expected one; received {part}"
                ) from None
            try:
                _fetch(entry.address, part, say)
            except (OSError, http.client.HTTPException, _NotTheFileError) as error:
                if not part.stat().st_size:
                    part.unlink()
                raise _by_hand(entry, path, _text_of(error)) from error
            _check_digest(entry, part)
            os.replace(part, path)
            _version_file(part).unlink(missing_ok=True)
    return path


def digest_of(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file.

    Args:
        path: the file.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _text_of(error: Exception) -> str:
    is_status = isinstance(error, urllib.error.HTTPError)
    reason = error if is_status else getattr(error, "reason", error)
    return reason_of(reason) if isinstance(reason, Exception) else str(reason)


class _NotTheFileError(ValueError):
    """The server answered with something else."""


def _by_hand(entry: Entry, path: pathlib.Path, reason: str) -> ValueError:
    return ValueError(
        f"Cannot download {entry.name}; expected a server that answers with the file; received "
        f"{reason}: open {entry.page} in a browser, and put the file at {path}"
    )


def _check_digest(entry: Entry, part: pathlib.Path) -> None:
    if entry.sha256 is None:
        return
    digest = digest_of(part)
    if digest != entry.sha256:
        part.unlink()
        raise ValueError(
            f"The file is not the published one; expected SHA-256 {entry.sha256}; received "
            f"{digest}: the download is deleted"
        )


def _fetch(address: str, part: pathlib.Path, say: Say) -> None:
    """Adds to the part what is missing in it."""
    have = part.stat().st_size
    request = urllib.request.Request(address)
    version = _version_file(part)
    if have:
        request.add_header("Range", f"bytes={have}-")
        if version.exists():
            # A file that has changed since then is sent as a whole.
            request.add_header("If-Range", version.read_text())
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_IS_EMPTY and _total(error.headers) == have:
            return
        if error.code == _RANGE_IS_EMPTY:
            part.write_bytes(b"")
        raise
    with answer:
        if answer.headers.get_content_type() == "text/html":
            raise _NotTheFileError("a page in place of the file")
        is_rest = answer.status == http.client.PARTIAL_CONTENT
        if is_rest and not (answer.headers["Content-Range"] or "").startswith(f"bytes {have}-"):
            raise _NotTheFileError("another part of the file than asked for")
        start = have if is_rest else 0
        length = answer.headers["Content-Length"]
        total = None if length is None else start + int(length)
        os.truncate(part, start)
        _remember_version(answer.headers, version)
        host = urllib.parse.urlsplit(address).hostname
        say(f"{part.name.removesuffix('.part')} from {host}: {_megabytes(total)}")
        _copy(answer, part, start, total, say)


def _copy(answer, part: pathlib.Path, start: int, total: int | None, say: Say) -> None:
    position, shown = start, start * 10 // total if total else 0
    with open(part, "r+b") as file:
        file.seek(start)
        while block := answer.read(_CHUNK):
            file.write(block)
            position += len(block)
            if total and position * 10 // total > shown:
                shown = position * 10 // total
                say(f"  {_megabytes(position)} of {_megabytes(total)}")
    if total is not None and position != total:
        raise _NotTheFileError(f"{position:,} of {total:,} bytes; the same command goes on")


def _remember_version(headers, version: pathlib.Path) -> None:
    """Stores what tells this version of the file from a later one."""
    mark = headers["ETag"] or headers["Last-Modified"]
    if mark and not mark.startswith("W/"):
        version.write_text(mark)
    else:
        version.unlink(missing_ok=True)


def _version_file(part: pathlib.Path) -> pathlib.Path:
    return part.with_name(f"{part.name}.version")


def _total(headers) -> int | None:
    match = re.fullmatch(r"bytes \*/(\d+)", headers["Content-Range"] or "")
    return int(match[1]) if match else None


def _megabytes(count: int | None) -> str:
    return "unknown size" if count is None else f"{count / 1e6:,.1f} MB"
