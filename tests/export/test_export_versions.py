"""Version folders: complete or absent, never shared, nothing of a killed exporter left."""

import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from he_keras.export import version_folders
from he_keras.export.version_folders import write_version
from he_keras.interrupts import KeptInterrupts

# Claims a place, says so, and waits to be killed.
SLEEPER = """
import sys, time
from he_keras.export.version_folders import write_version
def write(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(600)
write_version(sys.argv[1], write)
"""
LIMITED = """
import resource, sys
import keras
import he_keras as he
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(500), keras.layers.Dense(3)])
for limit in map(int, sys.argv[2:]):
    # Python ignores the signal that comes with the error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        he.export_saved_model(model, sys.argv[1])
    except OSError as error:
        print(f"{type(error).__name__}: {error}")
"""


def touch(folder):
    (folder / "saved_model.pb").touch()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_versions_increase_past_foreign_files(tmp_path):
    for name in ("7", "8-old", "v9", "１２x"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert write_version(tmp_path, touch) == tmp_path / "8"
    assert write_version(str(tmp_path), touch) == tmp_path / "9"
    assert names(tmp_path) == sorted(["7", "8", "9", "8-old", "v9", "１２x", "notes.txt"])


def test_a_file_takes_a_number_too(tmp_path):
    (tmp_path / "3").write_text("")
    assert write_version(tmp_path, touch).name == "4"


def test_written_aside_under_a_dot_name(tmp_path):
    seen = []

    def write(folder):
        seen.append((folder.parent, folder.name[0], names(tmp_path)))
        touch(folder)

    version = write_version(tmp_path, write)
    assert [(place, dot) for place, dot, _ in seen] == [(tmp_path, ".")]
    assert all(not name.isdecimal() for _, _, found in seen for name in found)
    assert names(version) == ["saved_model.pb"]


def test_a_number_taken_meanwhile_is_not_overwritten(tmp_path):
    def write(folder):
        touch(folder)
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "theirs").touch()

    assert write_version(tmp_path, write) == tmp_path / "2"
    assert names(tmp_path / "1") == ["theirs"]


def test_the_renaming_decides(tmp_path, monkeypatch):
    """Somebody takes the number between the look and the renaming."""
    rename = os.rename

    def late(source, target):
        if not target.exists() and target.name == "1":
            target.mkdir()
            (target / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(version_folders.os, "rename", late)
    assert write_version(tmp_path, touch) == tmp_path / "2"
    assert names(tmp_path / "1") == ["theirs"]


def test_exporters_at_the_same_time(tmp_path):
    barrier = threading.Barrier(8, timeout=60)
    found = []

    def write(folder):
        (folder / "who").write_text(threading.current_thread().name)
        barrier.wait()

    def export():
        version = write_version(tmp_path, write)
        found.append((version.name, (version / "who").read_text(), threading.current_thread().name))

    threads = [threading.Thread(target=export) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version for version, *_ in found) == list("12345678")
    assert all(wrote == thread for _, wrote, thread in found)
    assert names(tmp_path) == list("12345678")


def test_a_folder_that_is_removed_before_it_is_held(tmp_path, monkeypatch):
    """Another exporter, at its start, takes the new folder for one that was left behind."""
    removed = []

    def late(path, *settings):
        if not removed:
            removed.append(path)
            path.rmdir()
        return open_file(path, *settings)

    open_file = os.open
    monkeypatch.setattr(version_folders.os, "open", late)
    assert write_version(tmp_path, touch) == tmp_path / "1"
    assert len(removed) == 1


def test_remains_are_removed_but_not_what_is_held(tmp_path):
    for name in (".partial-1", ".partial-held", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    handle = os.open(tmp_path / ".partial-held", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        write_version(tmp_path, touch)
    finally:
        os.close(handle)
    assert names(tmp_path) == [".other", ".partial-held", "1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_failure_leaves_nothing(tmp_path, error):
    def write(folder):
        touch(folder)
        raise error("no")

    with pytest.raises(error):
        write_version(tmp_path, write)
    assert names(tmp_path) == []


# Ctrl-C, at the moments that are easily missed


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    """Tests that a shell starts in the background come without Python's handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedAtItsEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def drop_ctrl_c(folder):
    """In a finaliser, where Python drops the exception."""
    touch(folder)
    hook, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    try:
        InterruptedAtItsEnd()
    finally:
        sys.unraisablehook = hook


def swallow_ctrl_c(folder):
    """As libraries do that catch everything."""
    touch(folder)
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass


@pytest.mark.parametrize("write", [drop_ctrl_c, swallow_ctrl_c])
def test_ctrl_c_that_was_lost_publishes_nothing(tmp_path, write):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, write)
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_native_code_prints_no_traceback_of_ctrl_c(tmp_path, capsys):
    def print_error(error):
        sys.excepthook(type(error), error, None)

    def write(folder):
        print_error(OSError("of its own"))
        swallow_ctrl_c(folder)
        print_error(SystemError("returned a result with an exception set"))

    before = sys.excepthook
    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, write)
    assert capsys.readouterr().err == "OSError: of its own\n"
    assert sys.excepthook is before


def and_ctrl_c(function):
    def call(*args, **options):
        try:
            return function(*args, **options)
        finally:
            signal.raise_signal(signal.SIGINT)

    return call


def test_ctrl_c_right_behind_the_making_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "mkdir", and_ctrl_c(pathlib.Path.mkdir))
    tmp_path.joinpath("other").touch()
    with pytest.raises(KeyboardInterrupt):
        with version_folders._held_folder(tmp_path, KeptInterrupts()):
            pass
    assert names(tmp_path) == ["other"]


def test_ctrl_c_again_while_it_clears_up(tmp_path, monkeypatch):
    def write(folder):
        (folder / "deep").mkdir()
        touch(folder / "deep")
        signal.raise_signal(signal.SIGINT)

    def rmtree(folder, **options):
        signal.raise_signal(signal.SIGINT)
        remove(folder, **options)

    remove = shutil.rmtree
    monkeypatch.setattr(version_folders.shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, write)
    assert names(tmp_path) == []


def test_ctrl_c_after_the_renaming_leaves_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(version_folders.os, "rename", and_ctrl_c(os.rename))
    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, touch)
    assert names(tmp_path) == ["1"] and names(tmp_path / "1") == ["saved_model.pb"]


def test_a_program_may_handle_ctrl_c_itself(tmp_path):
    seen = []

    def write(folder):
        touch(folder)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: seen.append("asked"))
    try:
        assert write_version(tmp_path, write).name == "1"
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["asked"]


def test_errors_of_tensorflow_are_errors_of_the_system(tmp_path):
    def write(folder):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    with pytest.raises(OSError, match="expected room on the disk.*No space left on device"):
        write_version(tmp_path, write)
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_places_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Cannot write the SavedModel; expected a writable folder"):
        write_version(tmp_path / place, touch)


def test_others_may_read_a_version(tmp_path):
    """A server often runs as another user."""
    umask = os.umask(0o022)
    try:
        assert write_version(tmp_path, touch).stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)


@pytest.mark.slow
def test_killed_exporter(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    # Alive, it keeps its place.
    assert write_version(tmp_path, touch).name == "1"
    assert len(names(tmp_path)) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert write_version(tmp_path, touch).name == "2"
    assert names(tmp_path) == ["1", "2"]


@pytest.mark.slow
def test_full_disk(tmp_path):
    """A limit on the size of files stands for it: the same errors at the same places."""
    limits = ("0", "1000", "60000")
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "served", *limits],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["OSError"] * len(limits), answer.stdout
    assert names(tmp_path / "served") == []


def test_ctrl_c_while_it_is_held_is_found_by_the_check():
    passed = False
    with KeptInterrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
            passed = True
    assert not passed
