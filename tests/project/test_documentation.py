"""Every page: its code runs, its commands exist, its links lead somewhere."""

import importlib
import json
import pathlib
import re
import subprocess
import sys

import documentation
import pytest
from documentation import ROOT, blocks, commands, is_slow, pages, run_page, runs
from forked_programs import Program
from programs import loaded

import he_keras as he
import he_keras_cli
from he_keras.experiment import catalog, default_config
from he_keras.experiment.keys import MEANINGS, flat

LANGUAGES = {"python", "bash", "text", "json", "yaml"}
#: Blocks that nobody runs are an exception; each says why.
MOST_BLOCKS_NOT_RUN = 12
#: A page shows so many characters of code or output beside its two menus; commands are wrapped.
LONGEST_LINE = 105
WITH_CODE = [page for page in pages() if any(map(runs, blocks(page)))]
COMMANDS = {}
for _page in pages():
    for _command in commands(_page):
        COMMANDS.setdefault(_command.program, []).append(_command)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if is_slow(page) else ()) for page in WITH_CODE],
)
def test_the_code_of_a_page_runs(page):
    program = Program(run_page, page)
    out, err = program.communicate()
    assert program.returncode == 0, out + err


def test_blocks_say_what_they_are_and_few_do_not_run():
    unknown = {
        page: block.line
        for page in pages()
        for block in blocks(page)
        if block.language not in LANGUAGES
    }
    assert unknown == {}
    marks = [block.mark for page in pages() for block in blocks(page) if block.mark]
    assert [mark for mark in marks if not re.match(r"not run: .{10}|run$|slow: ", mark)] == []
    assert sum(mark.startswith("not run: ") for mark in marks) <= MOST_BLOCKS_NOT_RUN


def test_code_and_output_fit_a_page():
    too_long = [
        f"{page}:{block.line + number}"
        for page in pages()
        for block in blocks(page)
        if block.language != "bash"
        for number, line in enumerate(block.code.splitlines())
        if len(line) > LONGEST_LINE
    ]
    assert too_long == []


def test_the_pages_name_programs_that_there_are():
    known = {*he_keras_cli.PROGRAMS, "PROGRAM", "--help", "--version", "corruption_pictures"}
    assert len(COMMANDS) > 10
    assert {
        each.place: program
        for program, found in COMMANDS.items()
        for each in found
        if program not in known
    } == {}


@pytest.mark.parametrize("program", sorted(set(COMMANDS) & set(he_keras_cli.PROGRAMS)))
def test_the_commands_have_flags_that_there_are(program):
    with loaded(program):
        from absl import flags

        wrong = [
            (command.place, argument, mistake)
            for command in COMMANDS[program]
            for argument in command.arguments
            if (mistake := mistake_in(argument, flags.FLAGS))
        ]
    assert wrong == []


def mistake_in(argument, defined):
    """What is wrong with an argument of a command, or nothing."""
    if not argument.startswith("--"):
        return ""
    name, equals, value = argument.removeprefix("--").partition("=")
    if name in ("help", "import"):
        return ""
    if name.startswith("config."):
        return mistake_in_key(name.removeprefix("config."))
    if name not in defined:
        return "" if name.startswith("no") and name[2:] in defined else "no such flag"
    if not equals or re.search(r"[A-Z$]|\.\.\.", value) or not value:
        return ""
    try:
        if name == "config" and not value.endswith(".py"):
            return "" if pathlib.Path(catalog.path_of(value).partition(":")[0]).is_file() else "?"
        if name == "attacks" and "random-corner" not in value:
            [he.attacks.get(each, he.ThreatModel()) for each in value.split(",")]
        defined[name].parser.parse(value)
    except ValueError as error:
        return str(error)
    return ""


def mistake_in_key(key):
    section = key.rpartition(".")[0]
    open_sections = ("objective", "schedule", "epsilon_schedule", "network.options")
    known = key in MEANINGS or section in open_sections or key in ("objective", "data")
    return "" if known else "no such key"


def test_every_key_has_a_meaning():
    assert sorted(flat(default_config())) == sorted(MEANINGS)


def test_the_reference_names_things_and_not_modules_of_the_same_name(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "site")
    text = "\n".join(importlib.import_module("api").api_pages().values())
    named = re.findall(r"^::: (\S+)\.(\w+)$", text, re.MULTILINE)
    things = [getattr(importlib.import_module(place), name) for place, name in named]
    assert len(named) > 150 and all(map(callable, things))
    files = [ROOT.joinpath(*place.split("."), name) for place, name in named]
    assert not [each for each in files if each.is_dir() or each.with_suffix(".py").exists()]


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
            assert re.search(rf"^(\.PHONY:.*\b{target}\b|{target}\b.*:)", makefile, re.MULTILINE)


def tracked():
    answer = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in answer.stdout.splitlines()]


def test_every_page_that_is_named_anywhere_exists():
    wrong = []
    for path in tracked():
        if (
            path.suffix not in (".py", ".md", ".jinja", ".toml", ".yml", ".json")
            or not path.exists()
        ):
            continue
        for name in re.findall(
            r"\bdocs/[\w./-]+\.(?:md|ipynb)\b", path.read_text(encoding="utf-8")
        ):
            if not (ROOT / name).exists():
                wrong.append((str(path.relative_to(ROOT)), name))
    assert wrong == []


@pytest.mark.parametrize("name", ["README.md", "BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_outside_the_site_lead_to_files(name):
    """`make docs` checks the links between the pages of the site."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_the_notebook_is_stored_with_its_outputs():
    (path,) = (ROOT / "docs").glob("*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert kinds and "error" not in kinds


WRONG_PAGE = """# A page

```python
print(1 + 1)
```

```text
3
```

    he-keras is not looked for here

* In a list:

  ```bash
  he-keras evaluate --modle=a --mode=other \\
      --config.head.size=3 --nochecks  # a comment with --no_flag
  ```

<!-- not run: it would take hours -->
```python
raise SystemExit
```
"""


def test_what_is_wrong_on_a_page_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(documentation, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "page.md").write_text(WRONG_PAGE)
    found = blocks("page.md")
    assert [block.language for block in found] == ["python", "text", "bash", "python"]
    assert [runs(block) for block in found] == [True, False, False, False]
    with pytest.raises(AssertionError, match=r"page.md:4 printed\n2\n"):
        run_page("page.md")
    (command,) = commands("page.md")
    assert command.program == "evaluate"
    with loaded("evaluate"):
        from absl import flags

        mistakes = [mistake_in(argument, flags.FLAGS) for argument in command.arguments]
    assert mistakes[0] == "no such flag" and "value should be one of" in mistakes[1]
    assert mistakes[2:] == ["no such key", ""]
