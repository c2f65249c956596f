"""The examples of docs/your_model.md run, in their order; its commands have flags that exist."""

import pathlib
import re

import pytest
from programs import loaded

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_model.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    he-keras (\w+) (.*)$", PAGE, re.MULTILINE)


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with pytest.warns(UserWarning, match=r"taken out of the network \(random_translation\w*\)"):
        exec(compile("\n".join(blocks), "your_model.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine: softmax removed; images in 0..1 times 255 (")
    before, after = map(int, re.findall(r"\d+", lines[-2]))
    assert before < after - 10
    assert lines[-1] == "['InputLayer', 'Flatten', 'Dense']"
    assert (tmp_path / "attackable.keras").is_file()


@pytest.mark.parametrize(("program", "arguments"), COMMANDS, ids=lambda part: part.split()[0])
def test_the_commands_have_flags_that_exist(program, arguments):
    with loaded(program):
        from absl import flags

        names = [each.removeprefix("--").partition("=")[0] for each in arguments.split()]
        assert [name for name in names if name not in flags.FLAGS] == []


@pytest.mark.parametrize("flag", ["outputs", "pixels", "bounds"])
def test_the_flags_that_the_page_names_exist(flag):
    with loaded("evaluate"):
        from absl import flags

        assert f"--{flag}" in PAGE and flag in flags.FLAGS
