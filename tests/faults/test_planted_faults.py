"""The list of planted faults fits the package, and every fault is caught by a fast test."""

import ast
import os
import pathlib
import signal
import subprocess
import sys
import time

import planted_faults
import pytest

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PROGRAM = FOLDER / "planted_faults.py"
CAUGHT = next(fault for fault in planted_faults.FAULTS if fault.file == "losses.py")


def is_slow(node) -> bool:
    decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
    return any(name.startswith(("pytest.mark.slow", "pytest.mark.real")) for name in decorators)


def fast_tests_of(path) -> set[str]:
    """Names of a file's tests that `make test` runs."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    if any(mark.startswith("pytestmark") and "slow" in mark for mark in marks):
        return set()
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if not is_slow(node)}


def test_every_old_text_is_found_once():
    named = [(fault.name, planted_faults.problem_of(fault)) for fault in planted_faults.FAULTS]
    assert not [f"{name}: {problem}" for name, problem in named if problem]


def test_at_least_sixty_faults_of_different_names():
    names = [fault.name for fault in planted_faults.FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert all(fault.old != fault.new for fault in planted_faults.FAULTS)


def test_what_catches_a_fault_is_a_fast_test():
    for fault in planted_faults.FAULTS:
        file, _, test = fault.test.partition("::")
        assert test.partition("[")[0] in fast_tests_of(ROOT / file), fault


def test_every_named_case_of_a_test_exists(request):
    """A test whose parameters have changed answers to other names."""
    options = request.config.option
    if (
        options.keyword
        or getattr(options, "lf", False)
        or any("::" in each for each in request.config.args)
    ):
        pytest.skip("some tests were left out, so that not every name is known")
    collected = {item.nodeid for item in request.session.items}
    files = {name.partition("::")[0] for name in collected}
    named = {fault.test for fault in planted_faults.FAULTS if fault.test.split("::")[0] in files}
    # A name without parameters stands for all cases of a test.
    collected |= {name.partition("[")[0] for name in collected}
    assert sorted(named - collected) == []


def test_contributing_has_the_table():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert planted_faults.markdown() in text, "run tests/faults/planted_faults.py --markdown"


def test_an_old_text_that_is_gone_is_named_before_any_work(capsys):
    gone = CAUGHT._replace(old=CAUGHT.old + " # and more")
    assert planted_faults.main([], [gone]) == 1
    told = capsys.readouterr().out
    assert gone.old in told and f"nearest:  {CAUGHT.old}" in told


def run(arguments, faults="planted_faults.FAULTS"):
    code = f"import sys, planted_faults\nsys.exit(planted_faults.main({arguments}, {faults}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)


@pytest.mark.slow
def test_every_fault_is_caught():
    """`make test` runs the same tests without a fault."""
    ended = run(["--only_faults"])
    missed = [line for line in ended.stdout.splitlines() if not line.startswith("caught")]
    assert not ended.returncode, "\n".join(missed) + ended.stderr[-2000:]


@pytest.mark.slow
def test_a_fault_that_changes_nothing_and_a_test_that_fails_anyway_are_told():
    harmless = CAUGHT._replace(new=f"{CAUGHT.old}  # the same")
    ended = run(["--processes=1"], f"[planted_faults.Fault{tuple(harmless)!r}]")
    assert ended.returncode == 1 and "MISSED" in ended.stdout and "1 problems" in ended.stdout
    missing = CAUGHT._replace(test=f"{CAUGHT.test}_not")
    ended = run(["--processes=1"], f"[planted_faults.Fault{tuple(missing)!r}]")
    assert ended.returncode == 1 and "WRONG" in ended.stdout and "No test ran" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_program_leaves_nothing(ending, tmp_path):
    process = subprocess.Popen(
        [sys.executable, PROGRAM], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=-3
    )
    while not list(tmp_path.glob("planted-faults-*/*/output.txt")):
        assert process.poll() is None
        time.sleep(0.05)
    (children,) = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}").glob("children")
    started = children.read_text().split()
    process.send_signal(ending)
    assert process.wait(60) and started
    assert not list(tmp_path.iterdir())
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in started)
