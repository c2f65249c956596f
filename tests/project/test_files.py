"""Locks, and files that several processes write at the same moment."""

import errno
import fcntl
import os
import threading
import zipfile

import numpy as np
import pytest

from he_keras import files
from he_keras.evaluation.run import journal
from he_keras.export.version_folders import write_version
from he_keras.files import lock, lock_folder, replacing, write_npz


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that answers every lock with an error of its own."""

    def refuse(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_who_holds_a_lock(tmp_path):
    path = tmp_path / ".lock"
    with lock(path, shared=True) as first, lock(path, shared=True) as second:
        assert first and second
        with pytest.raises(BlockingIOError), lock(path):
            pass
    with lock(path) as alone:
        assert alone
        with pytest.raises(BlockingIOError), lock(path, shared=True):
            pass
    with lock_folder(tmp_path) as alone:
        assert alone
        with pytest.raises(BlockingIOError), lock_folder(tmp_path):
            pass


def test_nfs_is_given_what_it_needs_for_a_lock(tmp_path, monkeypatch):
    """Linux's NFSv4 answers EBADF to a shared lock without reading, to others without writing."""
    flock = fcntl.flock

    def strict(handle, kind):
        mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
        wanted = (os.O_RDONLY, os.O_RDWR) if kind & fcntl.LOCK_SH else (os.O_WRONLY, os.O_RDWR)
        if mode not in wanted:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", strict)
    with journal.locked(tmp_path, (0, 2)):
        with pytest.raises(ValueError, match="Another process"), journal.locked(tmp_path, (0, 2)):
            pass
        with pytest.raises(ValueError, match="Another process"), journal.locked(tmp_path, None):
            pass


def test_without_locks_nobody_is_said_to_hold_one(tmp_path, no_locks):
    with lock(tmp_path / ".lock") as is_held, lock(tmp_path / ".lock") as is_held_too:
        assert not is_held and not is_held_too
    with journal.locked(tmp_path, None), journal.locked(tmp_path, (0, 2)):
        pass


def test_without_locks_versions_are_written_and_nothing_is_taken_for_abandoned(tmp_path, no_locks):
    (tmp_path / ".partial-1").mkdir()
    assert write_version(tmp_path, lambda folder: (folder / "a").touch()) == tmp_path / "1"
    assert names(tmp_path) == [".partial-1", "1"]


def test_writers_of_one_file_at_the_same_moment(tmp_path):
    barrier = threading.Barrier(8, timeout=60)
    failures = []

    def write(number):
        try:
            with replacing(tmp_path / "settings.json") as temporary:
                barrier.wait()
                temporary.write_text(str(number))
                barrier.wait()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert names(tmp_path) == ["settings.json"]
    assert (tmp_path / "settings.json").read_text() in "01234567"


def test_what_a_killed_writer_left_is_removed_and_what_is_written_is_not(tmp_path, monkeypatch):
    abandoned = tmp_path / "partial-1-0123456789ab-a.npz"
    others = [tmp_path / "partial-1-0123456789ab-b.npz", tmp_path / "partial-a.npz"]
    for path in (abandoned, *others):
        path.touch()
    with replacing(tmp_path / "a.npz") as first, replacing(tmp_path / "a.npz") as second:
        assert not abandoned.exists()
        assert all(path.exists() for path in (*others, first, second))
        second.touch()
    monkeypatch.setattr(files, "lock_open_file", lambda *_, **__: False)
    abandoned.touch()
    write_npz(tmp_path / "a.npz", {})
    assert abandoned.exists(), "without locks its writer may live"


def test_a_temporary_file_that_is_removed_before_it_is_held(tmp_path, monkeypatch):
    removed = []
    lock_open_file = files.lock_open_file

    def late(handle, *settings, **named):
        if not removed:
            removed.extend(tmp_path.glob("partial-*"))
            removed[0].unlink()
        return lock_open_file(handle, *settings, **named)

    monkeypatch.setattr(files, "lock_open_file", late)
    write_npz(tmp_path / "a.npz", {"a": np.arange(3)})
    assert len(removed) == 1
    assert names(tmp_path) == ["a.npz"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_a_failed_writer_leaves_nothing(tmp_path, error):
    with pytest.raises(error), replacing(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise error
    assert names(tmp_path) == []


def test_a_full_disk_is_told_with_the_file(tmp_path):
    path = tmp_path / "numbers.npz"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        with replacing(path):
            # As `write` raises it: without a file.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match="elsewhere/none"), replacing(path):
        open("elsewhere/none")
    assert names(tmp_path) == []


def test_arrays_are_read_back_as_they_were_whatever_their_names(tmp_path):
    arrays = {
        "file": np.arange(6).reshape(2, 3),
        "allow_pickle": np.array(True),
        "pgd-20, scale 1": np.zeros((0, 3), "float32"),
    }
    write_npz(tmp_path / "a.npz", arrays)
    assert zipfile.ZipFile(tmp_path / "a.npz").namelist() == [f"{name}.npy" for name in arrays]
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        for name, array in arrays.items():
            np.testing.assert_array_equal(archive[name], array)
            assert archive[name].dtype == array.dtype
    with pytest.raises(ValueError, match="Object arrays"):
        write_npz(tmp_path / "a.npz", {"a": np.array([{}])})
    assert names(tmp_path) == ["a.npz"]
