"""The rules of CONTRIBUTING.md that can be read from the code.

Each rule is a function from a source text to the list of its violations, and is itself tested
against a text that breaks it.
"""

import ast
import graphlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("he_keras", "tools", "configs", "tests")

# A unit, which is a file or a package of he_keras, may import the units before it.
ORDER = (
    "version",
    "requirements",
    "native_messages",
    "arguments",
    "registry",
    "configurable",
    "environment",
    "distribution",
    "files",
    "drawing",
    "interrupts",
    "status_line",
    "refusals",
    "balls",
    "threat",
    "layers",
    "losses",
    "precision",
    "networks",
    "cpu",
    "model_files",
    "attacks",
    "objectives",
    "schedules",
    "optimizers",
    "current_functions",
    "adversarial_model",
    "snapshot_ensemble",
    "callbacks",
    "data",
    "evaluation",
    "classifiers",
    "analysis",
    "search",
    "zoo",
    "export",
    "serving",
    "experiment",
    "__init__",
    "benchmarks",
    "reproduction",
    "programs",
)
LAZY_IMPORTS = {
    "matplotlib",
    "scipy",
    "sklearn",
    "tensorflow_datasets",
    "cleverhans",
    "keras_tuner",
    "PIL",
    "jinja2",
    "markupsafe",
    "ml_collections",
    "tqdm",
    "aiohttp",
    "orjson",
    "prometheus_client",
    "simdjson",
    "torch",
    "onnx",
    "onnxruntime",
    "tf2onnx",
    "ai_edge_litert",
}
FORBIDDEN_FILES = {"utils.py", "common.py", "helpers.py"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
# Put together from parts, so that this file does not break its own rule.
LEFT_OVER_WORDS = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error"]
LEFT_OVER = re.compile(rf"\b({'|'.join(LEFT_OVER_WORDS)})\b")
CHECKS = re.compile(r"_?(assert|check|expect|raises|warns|fail)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source_files(*folders):
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.relative_to(ROOT) for path in paths]


def package_modules():
    """Returns the source of every module of he_keras by its dotted name below the package."""
    modules = {}
    for path in source_files("he_keras"):
        parts = path.relative_to("he_keras").with_suffix("").parts
        modules[".".join(parts)] = (ROOT / path).read_text(encoding="utf-8")
    return modules


def imported_names(source, module):
    """Yields (line, dotted name below he_keras) of each import of he_keras, lazy ones included."""
    package = ["he_keras", *module.split(".")][:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "he_keras":
                yield node.lineno, target.removeprefix("he_keras").removeprefix(".")


def resolve(name, modules):
    """Returns the module that a dotted name comes from: the name's own or its nearest package's."""
    parts = name.split(".") if name else []
    while parts:
        if ".".join(parts) in modules:
            return ".".join(parts)
        if ".".join([*parts, "__init__"]) in modules:
            return ".".join([*parts, "__init__"])
        parts.pop()
    return "__init__"


def import_graph(modules):
    """Returns {module: {imported module: line}}."""
    graph = {}
    for module, source in modules.items():
        graph[module] = {
            resolve(name, modules): line for line, name in imported_names(source, module)
        }
    return graph


def upward_imports(modules):
    """Lists imports of a unit that does not stand before the importing one, and unknown units."""
    found = [
        f"{module}: not in the order of the layout"
        for module in modules
        if module.split(".")[0] not in ORDER
    ]
    for module, targets in import_graph(modules).items():
        unit = module.split(".")[0]
        for target, line in targets.items():
            target_unit = target.split(".")[0]
            if unit == target_unit or not {unit, target_unit} <= set(ORDER):
                continue
            if ORDER.index(target_unit) >= ORDER.index(unit):
                found.append(f"{module}:{line}: imports {target}, which stands below it")
    return found


def import_cycles(modules):
    """Lists one cycle of imports between modules, if there is any."""
    graph = {module: set(targets) - {module} for module, targets in import_graph(modules).items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def asserts(source):
    nodes = ast.walk(ast.parse(source))
    return [f"{node.lineno}: assert" for node in nodes if isinstance(node, ast.Assert)]


def long_functions(source):
    return [
        f"{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def long_file(source):
    count = len(source.splitlines())
    return [f"{count} lines"] if count > MAX_FILE_LINES else []


def leftovers(source):
    lines = enumerate(source.splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if LEFT_OVER.search(line)]


def import_time_nodes(node):
    """Yields the nodes below `node` that run on import, which those inside a function do not."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.Lambda)):
            yield child
            yield from import_time_nodes(child)


def heavy_imports(source):
    found = []
    for node in import_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            continue
        heavy = [name for name in names if name.split(".")[0] in LAZY_IMPORTS]
        found += [f"{node.lineno}: imports {name}" for name in heavy]
    return found


def is_check(node):
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return bool(CHECKS.match(name))
    return False


def idle_tests(source):
    """Lists the test functions that check nothing, and so cannot fail."""
    return [
        f"{node.lineno}: {node.name} checks nothing"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, FUNCTIONS) and node.name.startswith("test")
        if not any(is_check(inner) for inner in ast.walk(node))
    ]


RULES = {
    asserts: ("he_keras",),
    heavy_imports: ("he_keras",),
    idle_tests: ("tests",),
    leftovers: FOLDERS,
    long_file: FOLDERS,
    long_functions: FOLDERS,
}
# `import he_keras` does not load these: a program is loaded when it is run, and functions import
# what keras-tuner's classes are extended in.
EXCEPTIONS = {
    heavy_imports: (
        ("he_keras", "programs"),
        ("he_keras", "benchmarks"),
        ("he_keras", "search", "oracle.py"),
        ("he_keras", "search", "tuner.py"),
    )
}


def is_excepted(path, rule):
    return any(path.parts[: len(each)] == each for each in EXCEPTIONS.get(rule, ()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    violations = [
        f"{path}:{violation}"
        for path in source_files(*RULES[rule])
        if not is_excepted(path, rule)
        for violation in rule((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not violations, "\n".join(violations)


def test_imports_go_downward_only():
    violations = upward_imports(package_modules())
    assert not violations, "\n".join(violations)


def test_imports_have_no_cycle():
    violations = import_cycles(package_modules())
    assert not violations, "\n".join(violations)


def test_no_file_is_a_junk_drawer():
    assert not [str(path) for path in source_files(*FOLDERS) if path.name in FORBIDDEN_FILES]


@pytest.mark.slow
def test_import_loads_nothing_beyond_keras_and_tensorflow():
    program = (
        "import sys, keras, tensorflow; before = set(sys.modules); import he_keras; "
        f"print(sorted({LAZY_IMPORTS} & (set(sys.modules) - before)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.slow
def test_import_prints_at_most_three_lines():
    environment = {name: value for name, value in os.environ.items() if "LOG_LEVEL" not in name}
    result = subprocess.run(
        [sys.executable, "-c", "import he_keras"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert result.returncode == 0 and result.stdout == ""
    assert len(result.stderr.splitlines()) <= 3, result.stderr


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (asserts, "if not x:\n    raise ValueError\n", "def f(x):\n    assert x\n"),
        (heavy_imports, "def f():\n    import PIL.Image\n", "import keras, PIL.Image\n"),
        (heavy_imports, "from he_keras import data\n", "from tqdm import tqdm\n"),
        (heavy_imports, "", "if x:\n    try:\n        import sklearn\n    finally:\n        f()\n"),
        (idle_tests, "def test_a():\n    assert f()\n", "def test_a():\n    f()\n"),
        (idle_tests, "def test_a():\n    np.testing.assert_equal(1, f())\n", "def test_a(): ...\n"),
        (idle_tests, "def test_a():\n    with pytest.raises(E): f()\n", "def test_a(): print()\n"),
        *[(leftovers, f"{word}S = 1\n", f"x = 1  # {word}: later\n") for word in LEFT_OVER_WORDS],
        (long_file, "x = 1\n" * 600, "x = 1\n" * 601),
        (
            long_functions,
            "def f():\n" + "    x = 1\n" * 49,
            "class A:\n  async def f():\n" + "    x = 1\n" * 50,
        ),
    ],
)
def test_the_rule_finds_a_violation(rule, good, bad):
    assert rule(good) == []
    assert len(rule(bad)) == 1


def test_upward_imports_are_found_in_every_form():
    modules = {
        "__init__": "from he_keras import attacks",
        "threat": "import numpy",
        "losses": "from he_keras.attacks.pgd import PGD",
        "attacks.__init__": "from he_keras.attacks.pgd import PGD\nfrom he_keras import losses",
        "attacks.pgd": "from ..threat import ThreatModel\nfrom .. import search",
        "search": "def f():\n    import he_keras",
        "toolbox": "import keras",
    }
    assert upward_imports(modules) == [
        "toolbox: not in the order of the layout",
        "losses:1: imports attacks.pgd, which stands below it",
        "attacks.pgd:2: imports search, which stands below it",
        "search:2: imports __init__, which stands below it",
    ]


def test_import_cycles_are_found():
    modules = {
        "attacks.__init__": "from he_keras.attacks import pgd",
        "attacks.pgd": "from he_keras.attacks.attack import Attack",
        "attacks.attack": "import keras",
    }
    assert import_cycles(modules) == []
    modules["attacks.attack"] = "def f():\n    from he_keras.attacks import get"
    assert len(import_cycles(modules)) == 1
