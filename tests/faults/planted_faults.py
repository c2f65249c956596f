"""Plants wrong mathematics into a copy of the package, one line at a time: is it caught?

    python tests/faults/planted_faults.py                  every fault, minutes of two cores
    python tests/faults/planted_faults.py --only momentum  faults whose name contains one of these
    python tests/faults/planted_faults.py --only_faults    after `make test`, which ran the tests
    python tests/faults/planted_faults.py --markdown       the table of CONTRIBUTING.md; no tests

Each fault names one fast test, which must fail with it and pass without it. The exit code is 0 if
all do. Python and TensorFlow start once: what runs tests is a fork of this process.
"""

import argparse
import collections
import difflib
import gc
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import planted_faults_attacks
import planted_faults_data
import planted_faults_evaluation
import planted_faults_layers
import planted_faults_objectives
import planted_faults_searches
import planted_faults_zoo

ROOT = pathlib.Path(__file__).resolve().parents[2]
_COPIED = ("he_keras", "tests", "tools", "configs")
# Stored numbers, which nothing writes to.
_LINKED = "tests/goldens"
_MOST_SECONDS = 600.0
_MOST_TESTS = 8
#: Exit codes of pytest, and what stands for a process that had to be ended.
_PASSED, _FAILED, _ENDED = 0, 1, -1
_ENDINGS = {signal.SIGINT, signal.SIGTERM}


class Fault(NamedTuple):
    """One wrong line of a file of the package, and the fast test that must notice it."""

    name: str
    file: str
    old: str
    new: str
    test: str


FAULTS = [
    Fault(*row)
    for row in (
        *planted_faults_layers.FAULTS,
        *planted_faults_attacks.FAULTS,
        *planted_faults_searches.FAULTS,
        *planted_faults_objectives.FAULTS,
        *planted_faults_data.FAULTS,
        *planted_faults_evaluation.FAULTS,
        *planted_faults_zoo.FAULTS,
    )
]


class Job(NamedTuple):
    """Tests to run, with a fault or without."""

    tests: list[str]
    fault: Fault | None = None


class Outcome(NamedTuple):
    """Exit code and output of pytest, and the seconds of CPU it took."""

    code: int
    output: str
    cpu_seconds: float

    def reasons(self) -> list[str]:
        """What pytest says of the tests that did not pass."""
        return re.findall(r"^(?:FAILED|ERROR):? (.*)", self.output, re.MULTILINE)


def problem_of(fault: Fault) -> str:
    """What is wrong with an entry of the list; empty if nothing is."""
    path = ROOT / "he_keras" / fault.file
    if not path.is_file():
        return f"there is no file he_keras/{fault.file}"
    text = path.read_text(encoding="utf-8")
    count = text.count(fault.old)
    if count == 1 and "\n" not in fault.old + fault.new:
        return ""
    lines = [line.strip() for line in text.splitlines()]
    nearest = difflib.get_close_matches(fault.old, lines, 1, cutoff=0.3) or ["none"]
    return (
        f"he_keras/{fault.file} must hold the old text once, in one line; found {count} times\n"
        f"    old text: {fault.old}\n    nearest:  {nearest[0]}"
    )


def markdown() -> str:
    """The table of CONTRIBUTING.md."""
    rows = ["| planted fault | in `he_keras/` | caught by |", "|---|---|---|"]
    for fault in FAULTS:
        rows.append(f"| {fault.name} | `{fault.file}` | `{fault.test}` |")
    return "\n".join(rows)


class Workshops:
    """Copies of the repository, in each of which one process at a time runs tests."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: dict[int, tuple[Job, int, float, Callable]] = {}

    def __enter__(self) -> "Workshops":
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="planted-faults-"))
        try:
            for place in range(self._count):
                _copy_repository(self._place(place))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for pid in self._running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder)

    def run(self, jobs: list[Job]):
        """Yields every job and its outcome as it ends."""
        waiting, free = collections.deque(jobs), list(range(self._count))
        while waiting or self._running:
            while waiting and free:
                self._start(waiting.popleft(), free.pop())
            time.sleep(0.02)
            for pid in list(self._running):
                outcome = self._outcome(pid)
                if outcome is not None:
                    job, place, _, take_out = self._running.pop(pid)
                    take_out()
                    free.append(place)
                    yield job, outcome

    def _place(self, place: int) -> pathlib.Path:
        return self._folder / str(place)

    def _start(self, job: Job, place: int) -> None:
        folder = self._place(place)
        take_out = _plant(folder, job.fault)
        sys.stdout.flush()
        # An interruption inside of `fork` would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        pid = os.fork()
        if not pid:
            code = 3
            try:
                code = _run_tests(job, folder)
            finally:
                os._exit(code)
        os.setpgid(pid, pid)
        self._running[pid] = job, place, time.monotonic(), take_out
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)

    def _outcome(self, pid: int) -> Outcome | None:
        _, place, began, _ = self._running[pid]
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended and time.monotonic() - began < _MOST_SECONDS:
            return None
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status) if ended else _ENDED
        output = _log(self._place(place)).read_text(encoding="utf-8", errors="replace")
        return Outcome(code, output, usage.ru_utime + usage.ru_stime)


def _copy_repository(folder: pathlib.Path) -> None:
    # With the compiled files, which are most of an import, and the times that keep them valid.
    linked = ROOT / _LINKED
    for name in _COPIED:
        ignored = shutil.ignore_patterns(linked.name) if name == linked.parent.name else None
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / _LINKED).symlink_to(linked)
    shutil.copy2(ROOT / "pyproject.toml", folder)


def _log(folder: pathlib.Path) -> pathlib.Path:
    return folder / "output.txt"


def _plant(folder: pathlib.Path, fault: Fault | None):
    """Plants a fault into a copy of the package; returns a function that takes it out again."""
    if fault is None:
        return lambda: None
    path = folder / "he_keras" / fault.file
    times, text = path.stat(), path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")

    def take_out() -> None:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return take_out


def _run_tests(job: Job, folder: pathlib.Path) -> int:
    """Runs in a process of its own, and returns the exit code of pytest."""
    import pytest

    # A group of its own: what a test starts ends with it, and Ctrl-C is the parent's matter.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    output = os.open(_log(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    # A compiled fault would outlive it.
    sys.dont_write_bytecode = job.fault is not None
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *(["-x"] if job.fault else []), *job.tests]))


def _jobs_without_faults(faults: list[Fault]) -> list[Job]:
    """Every test that a fault names, a few at a time."""
    tests = sorted({fault.test for fault in faults})
    parts = [tests[first : first + _MOST_TESTS] for first in range(0, len(tests), _MOST_TESTS)]
    return [Job(part) for part in parts]


def _is_right(job: Job, outcome: Outcome) -> bool:
    """Prints what became of a job; returns whether that is as it should be."""
    is_right = outcome.code == (_PASSED if job.fault is None else _FAILED)
    reasons = outcome.reasons()
    if job.fault is None:
        if not is_right:
            print(f"WRONG   without any fault, exit code {outcome.code} of: {' '.join(job.tests)}")
            print("\n".join(f"        {reason}" for reason in reasons) or outcome.output[-2000:])
        return is_right
    verdict = "caught" if is_right else "MISSED"
    print(f"{verdict}  {outcome.cpu_seconds:4.1f} s  {job.fault.name}: {job.fault.test}")
    if outcome.code == _PASSED:
        print("        The test passes all the same.")
    elif outcome.code == _ENDED:
        print(f"        No end after {_MOST_SECONDS:.0f} s.")
    elif not is_right:
        print(f"        No test ran (exit code {outcome.code}): {outcome.output[-2000:]}")
    return is_right


def _checked(faults: list[Fault], num_processes: int, only_faults: bool) -> int:
    """Runs everything; returns the exit code of the program."""
    # Once, before the forks; not he_keras, of which each has a copy of its own.
    import hypothesis  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401
    import scipy.stats  # noqa: F401

    # Looking for garbage in the memory of a fork copies it, which was a third of a short test.
    gc.collect()
    gc.freeze()
    began, wrong = time.monotonic(), 0
    jobs = [] if only_faults else _jobs_without_faults(faults)
    jobs += [Job([fault.test], fault) for fault in faults]
    with Workshops(num_processes) as workshops:
        for job, outcome in workshops.run(jobs):
            wrong += not _is_right(job, outcome)
    print(f"{len(faults)} faults, {wrong} problems, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def main(arguments=None, faults: list[Fault] = FAULTS) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="faults whose name contains one of these texts")
    parser.add_argument("--only_faults", action="store_true", help="no test without a fault")
    parser.add_argument("--markdown", action="store_true", help="print the table, run nothing")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4))
    given = parser.parse_args(arguments)
    if given.markdown:
        print(markdown())
        return 0
    texts = given.only or [""]
    chosen = [fault for fault in faults if any(text in fault.name for text in texts)]
    problems = [f"{fault.name}: {problem_of(fault)}" for fault in chosen if problem_of(fault)]
    if problems or not chosen:
        print("\n".join(problems) or f"No fault has a name with {texts}")
        return 1
    # An ended program ends its processes and removes its folder, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A shell that runs a program in the background has it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Their imports would take a third of the time.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return _checked(chosen, given.processes, given.only_faults)


if __name__ == "__main__":
    sys.exit(main())
