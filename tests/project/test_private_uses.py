"""The private names of the package that tests use: all of them, how often, and why.

A test asks the public behaviour. Where nothing public shows the fault, or a real value would take
minutes, it may use a private name, which then stands in this table. The numbers only go down.
"""

import ast
import collections
import pathlib

TESTS = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "he_keras"
#: Private by their spelling only: names of Python and of notebooks.
OTHERS = {"_replace", "_asdict", "_exit", "_fields", "_repr_html_"}
SMALL = "A limit for large models or data, set so low that small ones reach it."
INSIDE = "One step of a longer calculation, compared with NumPy: its result alone has many causes."
TAKEN = "Which of two ways was taken: both give the same values."
TRAINS = "In place of a training or an attack that would take minutes."
REGISTRY = "What is registered under a name: a user sees only what it builds."
TIMING = "A thread or clock of the server, which answers do not show."

ALLOWED = {
    SMALL: {
        "_BLOCK_SIZE": 1,
        "_FEWEST_WEIGHTS": 1,
        "_LARGE_GRADIENT": 1,
        "_LARGE_KERNEL": 1,
        "_PRODUCT_WIDTH": 1,
        "_RETRY_SECONDS": 1,
        "_VALUES_AT_ONCE": 1,
    },
    INSIDE: {
        "_Answers": 1,
        "_FIRST": 1,
        "_Recorder": 1,
        "_SECOND": 1,
        "_SHARE": 1,
        "_STREAM": 1,
        "_checked": 2,
        "_draw": 1,
        "_draw_targets": 2,
        "_held_folder": 1,
        "_initial_state": 1,
        "_loss": 2,
        "_nothing_found": 1,
        "_ratios": 1,
        "_row": 1,
        "_row_sums": 2,
        "_start": 5,
        "_state": 1,
        "_step": 2,
        "_table": 1,
        "_windows": 1,
        "_without_radial_gradient": 1,
    },
    TAKEN: {
        "_compiled": 2,
        "_folded": 1,
        "_norms": 1,
        "_passed": 2,
        "_products": 1,
        "_stored": 1,
    },
    TRAINS: {
        "_Measure": 1,
        "_accuracy": 1,
        "_set_aside": 1,
        "_write": 1,
    },
    REGISTRY: {
        "_ENTRIES": 1,
    },
    TIMING: {
        "_Packed": 1,
        "_models": 1,
        "_poller": 1,
        "_time": 1,
        "_timeout_seconds": 2,
        "_waiting": 1,
    },
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined(tree):
    """Returns the private names that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_self(node.value):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def used(tree):
    """Returns the names that a module takes from others; `monkeypatch` is given them as texts."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not is_self(node.value):
                names.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.Call):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            names += [each.rpartition(".")[2] for each in texts if isinstance(each, str)]
    own = defined(tree)
    return [name for name in names if name not in own]


def trees(folder, skipped=()):
    paths = (path for path in sorted(folder.rglob("*.py")) if path.name not in skipped)
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def test_private_names_are_used_for_a_reason_and_no_more_often():
    ours = set().union(*map(defined, trees(PACKAGE))) - OTHERS
    names = [name for tree in trees(TESTS, {"test_private_names.py"}) for name in used(tree)]
    found = collections.Counter(name for name in names if name in ours)
    allowed = {name: count for group in ALLOWED.values() for name, count in group.items()}
    assert len(ours) > 500 and found
    more = {name: count for name, count in found.items() if count > allowed.get(name, 0)}
    assert more == {}, "ask the public behaviour, or enter the name under its reason"
    gone = set(allowed) - set(found)
    assert gone == set(), "take these out of the table"


def test_uses_are_found_in_every_form():
    source = (
        "from he_keras import _a\nx._b.c\nself._own\nmonkeypatch.setattr(x, '_d', 1)\n"
        "patch.setattr('he_keras.x._e', 1)\nprint('text')"
    )
    found = sorted(name for name in used(ast.parse(source)) if is_private(name))
    assert found == ["_a", "_b", "_d", "_e"]
    assert defined(ast.parse("def _f(): pass\n_G = 1\nself._h = 2\ni = _j")) == {"_f", "_G", "_h"}
