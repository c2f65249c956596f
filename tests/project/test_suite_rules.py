"""Rules for the tests: seeded draws, no verdict by a clock, no test that imports another."""

import ast
import pathlib
import re

import hypothesis
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1]
#: Their clocks say when to give up, when to strike and how long it took: no verdict hangs on them.
MAY_READ_CLOCKS = {"waiting.py", "test_kills.py", "test_serving_faults.py", "planted_faults.py"}
CLOCKS = {
    f"time.{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
}
#: Random however they are called.
UNSEEDED = {"random.SystemRandom", "os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4"}
#: Random unless they are given a seed.
NEED_A_SEED = {
    "random.Random",
    "random.seed",
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.seed",
}


def full_name(node, imported):
    """Returns the dotted name of an expression, with imports resolved, or ""."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute):
        start = full_name(node.value, imported)
        return start and f"{start}.{node.attr}"
    return ""


def imports(tree):
    """Returns what each imported name stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                whole = each.asname is not None
                names[each.asname or each.name.partition(".")[0]] = (
                    each.name if whole else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    return names


def offences(source, may_read_clocks=False):
    """Returns "line: what" of every clock and every draw without a seed."""
    tree = ast.parse(source)
    imported, found = imports(tree), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = full_name(node, imported)
            if name in UNSEEDED or name.startswith("secrets."):
                found.append(f"{node.lineno}: {name}")
            if name in CLOCKS and not may_read_clocks:
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Call) and full_name(node.func, imported) in NEED_A_SEED:
            given = [*node.args, *(each.value for each in node.keywords)]
            if not given or (isinstance(given[0], ast.Constant) and given[0].value is None):
                found.append(f"{node.lineno}: {full_name(node.func, imported)} without a seed")
    return found


def test_every_draw_is_seeded_and_no_clock_is_read():
    found = {
        path.name: offences(path.read_text(encoding="utf-8"), path.name in MAY_READ_CLOCKS)
        for path in FOLDER.rglob("*.py")
    }
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import time\nassert time.monotonic() < 5",
        "from time import perf_counter as now\nnow()",
        "import random\nrandom.SystemRandom().random()",
        "import random\nrandom.Random()",
        "import numpy as np\nnp.random.default_rng(None)",
        "import numpy.random\nnumpy.random.RandomState()",
        "import os\nos.urandom(3)",
        "import secrets\nsecrets.token_bytes()",
    ],
)
def test_offences_are_found(source):
    assert len(offences(source)) == 1


def test_no_test_imports_another():
    """What tests share is in tests/builders, which a test may import by its plain name."""
    tests = {path.stem: path for path in FOLDER.rglob("test_*.py")}
    found = []
    for path in FOLDER.rglob("*.py"):
        names = imports(ast.parse(path.read_text(encoding="utf-8"))).values()
        found += [f"{path.name}: {name}" for name in names if set(name.split(".")) & set(tests)]
    assert len(tests) > 100 and found == []


def folders_without_a_twin(tests, package):
    """Returns the folders of tests and of the package that only one of them has.

    `model` has the tests of the files that stand in no folder.
    """
    others = {"builders", "faults", "goldens", "model", "project"}
    of_tests = {path.parent.name for path in tests.glob("*/*.py")} - others
    return sorted(of_tests ^ {path.parent.name for path in package.glob("*/__init__.py")})


def test_the_folders_of_tests_mirror_the_package(tmp_path):
    assert folders_without_a_twin(FOLDER, FOLDER.parent / "he_keras") == []
    assert [path for path in FOLDER.rglob("test_*.py") if path.parent.parent != FOLDER] == []
    for path in ("tests/attakcs/test_a.py", "tests/model/test_b.py", "he_keras/zoo/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    found = folders_without_a_twin(tmp_path / "tests", tmp_path / "he_keras")
    assert found == ["attakcs", "zoo"]


def test_the_tests_that_ci_names_exist():
    root = FOLDER.parent
    named = re.findall(r"tests/\S+\.py", (root / ".ci" / "run").read_text(encoding="utf-8"))
    assert named and [name for name in named if not (root / name).is_file()] == []


def test_what_is_allowed():
    source = """
import random, time
import numpy as np
random = np.random.default_rng(0)
random.random()
time.sleep(1)
"""
    assert offences(source) == []
    assert offences("import time\ntime.monotonic()", may_read_clocks=True) == []


def test_hypothesis_draws_the_same_examples_in_every_run():
    assert hypothesis.settings().derandomize
    assert hypothesis.settings().deadline is None
