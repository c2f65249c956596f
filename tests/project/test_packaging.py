"""The source distribution and the wheel: what is in them, and that they work once installed."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from programs import ROOT

import he_keras as he
import he_keras_cli

#: Not a part of the source: caches, environments, results.
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", ".tfds", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build",
    "dist", "runs", "site", "*.py[cod]",
)  # fmt: skip
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def run(*command, cwd):
    answer = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-3000:]
    return answer.stdout


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of the tree, the source distribution, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("built")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=IGNORED)
    files = files_below(tree)
    run(sys.executable, "-m", "venv", folder / "tools", cwd=folder)
    tools = folder / "tools" / "bin" / "python"
    run(tools, "-m", "pip", "install", "-q", "setuptools>=77", "wheel", cwd=folder)
    run(tools, "-c", BUILD, "build_sdist", folder, cwd=tree)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    inside = files_below(unpacked)
    run(tools, "-c", BUILD, "build_wheel", folder, cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return files, source, inside, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of the programs of an environment with the wheel, and the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", built[3], cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in such a file is not searched for further ones: the editable he_keras stays out.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_files(built):
    files, source, inside, wheel = built
    assert source.name == f"he_keras-{he.__version__}.tar.gz"
    assert wheel.name == f"he_keras-{he.__version__}-py3-none-any.whl"
    left_out = {name for name in files - inside if not name.startswith((".github/", ".gitignore"))}
    assert left_out == set()
    assert {"tests/conftest.py", "CITATION.cff", "constraints.txt"} <= inside
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in files if name.startswith("he_keras/")} | {"he_keras_cli.py"}
    assert any(name.endswith(".jinja") for name in package) and "he_keras/py.typed" in package
    assert package <= names
    assert {name.split("/")[0] for name in names - package} == {
        f"he_keras-{he.__version__}.dist-info"
    }


@pytest.mark.slow
def test_the_installed_wheel_works(installed, tmp_path):
    command = installed / "he-keras"
    assert run(command, "--version", cwd=tmp_path) == f"he-keras {he.__version__}\n"
    run(command, "train", "--config=quickstart_digits", "--smoke", "--output_dir=a", cwd=tmp_path)
    flags = ("--data=digits", "--epsilon=0.1", "--attacks=fgsm", "--num_examples=20", "--nochecks")
    printed = run(command, "evaluate", "--model=a/model.keras", *flags, cwd=tmp_path)
    assert "n = 20" in printed
    assert (tmp_path / "evaluation" / "report.html").read_text(encoding="utf-8").count("<style>")
    where = run(
        installed / "python", "-c", "import he_keras; print(he_keras.__file__)", cwd=tmp_path
    )
    assert pathlib.Path(where.strip()).is_relative_to(installed.parent)


def test_the_version_is_shown_without_tensorflow(tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["he-keras", "--version"]
import he_keras_cli
he_keras_cli.main()
sys.exit(bool({{"tensorflow", "keras", "numpy"}} & set(sys.modules)))
"""
    assert run(sys.executable, "-c", script, cwd=tmp_path) == f"he-keras {he.__version__}\n"


def test_every_place_that_names_the_version_agrees():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = changelog.partition(f"## {he.__version__} - ")[2][:10]
    assert len(date) == 10
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {he.__version__}" in citation and f'date-released: "{date}"' in citation
    assert f"is {he.__version__}," in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    build = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    assert f"he_keras-{he.__version__} " in build and f"`{he.__version__}`" in build


def test_every_program_has_a_module_a_tool_and_a_name():
    programs = set(he_keras_cli.PROGRAMS)
    tools = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"corruption_pictures"}
    assert tools == programs
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="he-keras")
    assert entry.value == "he_keras_cli:main"
