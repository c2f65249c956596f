"""docs/how-to/own_parts.md: its module and its commands, and what goes wrong with `--import`."""

import json
import pathlib
import re
import sys

import pytest
from own_names import forget
from programs import assert_one_line_error

from he_keras import attacks, networks, objectives, schedules
from he_keras.data import loading
from he_keras.programs import own_parts

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "own_parts.md").read_text(encoding="utf-8")
NAMES = re.findall(r"""register[\w.]*\(["']([\w-]+)""", PAGE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files of the page; its names are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    parts, config = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_parts.py").write_text(parts)
    (tmp_path / "my_config.py").write_text(config)
    yield tmp_path
    forget_the_page()


def forget_the_page():
    forget(*NAMES)
    sys.modules.pop("my_parts", None)


@pytest.mark.slow
def test_the_commands_of_the_page(folder, run):
    train, evaluate = re.findall(r"^he-keras (\w+) (.*)$", PAGE, re.MULTILINE)
    code, _, err = run(train[0], *train[1].split())
    assert code == 0, err
    config = json.loads((folder / "runs/mine/config.json").read_text())
    assert config["imports"] == ["my_parts"]
    # As another process would begin.
    forget_the_page()
    forgotten = evaluate[1].replace("--import=my_parts ", "")
    answer = run(evaluate[0], *forgotten.split())
    # The name of an attack is checked before the model is read.
    assert_one_line_error(answer, "Unknown attack", "'random-corner'", "needs --import=MODULE")
    answer = run(evaluate[0], *forgotten.replace("random-corner,", "").split())
    assert_one_line_error(answer, "parts of its own", "--import=my_parts", "runs/mine")
    # A part's class stays known to Keras; here it is registered once more.
    code, out, err = run(evaluate[0], *evaluate[1].split())
    assert code == 0, err
    assert "random-corner" in out and "pgd-5" in out
    assert json.loads((folder / "runs/mine/evaluation/report.json").read_text())["num_examples"]


@pytest.mark.parametrize("given", ["my_parts", "my_parts.py"])
def test_every_kind_is_known_by_its_name(folder, run, given):
    answer = run("evaluate", f"--import={given}", "--model=my_parts.py", "--data=corners")
    assert_one_line_error(answer, "No model; expected an existing .keras file")
    assert "random-corner" in attacks.names()
    assert "noise" in objectives.names() and "one-layer" in networks.names()
    assert "halving" in schedules.SCHEDULES
    assert len(loading.load("corners", "test")) == 200
    # The working folder is looked at for the import only.
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("text", "arguments", "parts"),
    [
        ("", ["--import=my_part"], ["No such module", "--import=my_part"]),
        ("1 / 0", ["--import=broken"], ["Cannot import broken", "ZeroDivisionError"]),
        ("import nowhere_to_be_found", ["--import", "broken"], ["No module named 'nowhere"]),
        ("", ["--impor=broken"], ["Unknown flag", "did you mean '--import'?"]),
        ("import sys; sys.exit(0)", ["--import=broken"], ["under if __name__ == '__main__'"]),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(folder, run, text, arguments, parts):
    (folder / "broken.py").write_text(text)
    answer = run("evaluate", *arguments, "--model=broken.py", "--data=digits")
    assert_one_line_error(answer, *parts)
    sys.modules.pop("broken", None)


@pytest.mark.parametrize("call", ["at_once", "in_a_graph", "in_numpy"])
def test_an_error_of_its_code_is_one_sentence_with_the_line(folder, call):
    """The other parts of the program are not named, and an error that says enough stays."""
    (folder / "broken.py").write_text(
        "import tensorflow as tf\n"
        "def at_once():\n    raise RuntimeError('two\\nlines')\n"
        "@tf.function\ndef in_a_graph():\n    tf.debugging.assert_less(2.0, 1.0, 'two lines')\n"
        "def in_numpy():\n    return tf.numpy_function(at_once, [], tf.float32)\n"
        "def with_a_sentence():\n    raise ValueError('No; expected yes; received no')\n"
    )
    own_parts.import_all(["broken"])
    module = sys.modules["broken"]
    with pytest.raises(Exception) as error:
        getattr(module, call)()
    sentence = own_parts.sentence_of(error.value)
    assert sentence.startswith("A part of your own does not run; expected") and "\n" not in sentence
    assert "two lines" in sentence and re.search(r"broken.py, line \d+\)$", sentence)
    with pytest.raises(ValueError) as error:
        module.with_a_sentence()
    assert own_parts.sentence_of(error.value) == ""
    own_parts.import_all([])
    assert own_parts.sentence_of(RuntimeError("of the package")) == ""
    del sys.modules["broken"]
