"""Mistakes on the command line: one line, what was allowed, and what was probably meant."""

import subprocess
import sys

import numpy as np
import pytest
from programs import ROOT, assert_one_line_error
from registered_attacks import base_name

import he_keras as he
import he_keras_cli
from he_keras import attacks
from he_keras.analysis import summaries
from he_keras.arguments import unknown_name
from he_keras.programs import registered


@pytest.mark.parametrize(
    ("program", "arguments", "parts"),
    [
        ("evaluate", ["--atacks=fgsm"], ["Unknown flag", "--pixels", "did you mean '--attacks'?"]),
        ("evaluate", ["--modle=m"], ["Unknown flag", "did you mean '--mode' or '--model'?"]),
        ("evaluate", ["--nothing=3"], ["Unknown flag; expected one of", "--attacks", "--nothing"]),
        ("train", ["--smok"], ["Unknown flag", "did you mean '--smoke'?"]),
        ("evaluate", ["--mode=survivor"], ["Unknown --mode", "did you mean 'survivors'?"]),
        ("evaluate", ["--pixels=0..25"], ["expected one of auto, 0..1, 0..255", "'0..255'?"]),
        ("evaluate", ["{files}/mine.keras"], ["did you mean --model={files}/mine.keras?"]),
        ("evaluate", ["gone.keras"], ["did you mean --model=gone.keras?"]),
        ("evaluate", ["gone.npz"], ["did you mean --data=gone.npz?"]),
        ("evaluate", ["{files}/run"], ["did you mean --run={files}/run?"]),
        ("export", ["{files}/mine.keras"], ["did you mean --model={files}/mine.keras?"]),
        ("train", ["quickstart_digits"], ["did you mean --config=quickstart_digits?"]),
        ("train", ["--config=quickstart_digit"], ["Unknown configuration", "FILE.py", "digits'?"]),
        (
            "train",
            ["--config=quickstart_digits:he"],
            ["quickstart_digits takes no argument; expected --config=quickstart_digits; received"],
        ),
        ("evaluate", ["--model={files}/run", "--data=digits", "--norm=linff"], ["mean 'linf'?"]),
        ("benchmark", ["attack"], ["Unknown benchmark", "did you mean 'attacks'?"]),
        ("import", ["nope.pt"], ["Missing flag; expected --recipe=NAME and --output=FILE.keras"]),
        (
            "train",
            ["--config=quickstart_digits", "--config.train.epoch=3"],
            ["Unknown configuration key", "batch_size", "did you mean 'epochs'?"],
        ),
        (
            "train",
            ["--config=quickstart_digits", "--config.trein.epochs=3"],
            ["Unknown configuration key", "did you mean 'train'?"],
        ),
        ("train", [], ["No configuration; expected --config=FILE"]),
        ("search", [], ["No configuration; expected --config=FILE"]),
        ("train", ["--config={files}/nowhere.py"], ["No configuration file", "{files}/nowhere.py"]),
        (
            "train",
            ["--config=quickstart_digits", "--config.train.epochs=three"],
            [
                "Invalid --config.train.epochs; expected an integer; received",
                "--config.train.epochs=three",
            ],
        ),
        ("merge", ["--run={files}/run", "--dry_run"], ["Not a flag of merge", "--dry_run"]),
        ("verify", ["--run={files}/run", "--shard=0/2"], ["Not a flag of verify", "--shard"]),
        ("evaluate", ["--run={files}/run", "--attacks="], ["No attacks; expected --attacks=NAME"]),
        ("evaluate", ["--run={files}/run", "--attacks=pdg-20"], ["did you mean 'pgd-20'?"]),
        ("gate", ["--run={files}/run", "--attacks=pdg-20"], ["did you mean 'pgd-20'?"]),
        ("transfer", ["{files}/run"], ["Too few models; expected he-keras transfer PATH PATH"]),
        ("analyze", ["gradient-norm"], ["Unknown analysis", "did you mean 'gradient-norms'?"]),
        ("reproduce", ["he_table_2", "--rows=TRADE"], ["Unknown row", "did you mean 'TRADES'?"]),
        (
            "evaluate",
            ["--model={files}/mine.kera", "--data=digits"],
            ["No model", "did you mean 'mine.keras'?"],
        ),
        (
            "evaluate",
            ["--model={files}/cut.keras", "--data=digits"],
            ["Cannot load the model", "{files}/cut.keras: damaged, or of another kind: 3 bytes"],
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(run, tmp_path, program, arguments, parts):
    (tmp_path / "mine.keras").write_bytes(b"")
    (tmp_path / "cut.keras").write_bytes(b"PK\3")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "model.keras").write_bytes(b"")
    answer = run(program, *[each.format(files=tmp_path) for each in arguments])
    assert_one_line_error(answer, *[each.format(files=tmp_path) for each in parts])


@pytest.mark.parametrize(
    ("program", "meant"),
    [
        ("evalute", "did you mean he-keras evaluate?"),
        ("{files}/mine.keras", "did you mean he-keras evaluate --model={files}/mine.keras?"),
    ],
)
def test_an_unknown_program_is_one_line(monkeypatch, capsys, tmp_path, program, meant):
    (tmp_path / "mine.keras").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["he-keras", program.format(files=tmp_path)])
    with pytest.raises(SystemExit) as end:
        he_keras_cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Unknown program; expected he-keras train|evaluate|")
    assert line.endswith(meant.format(files=tmp_path))


def test_errors_of_keras_come_without_bold_type(run, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("\x1b[1mShapes\x1b[0m do\n not \x1b[38;5;34mfit\x1b[0m")

    monkeypatch.setattr(he.model_files, "load_classifier", fail)
    (tmp_path / "any.keras").touch()
    answer = run("export", f"--model={tmp_path}/any.keras", f"--output_dir={tmp_path}/out")
    assert_one_line_error(answer, "error: Shapes do not fit\n")


@pytest.mark.parametrize("name", ["he_keras", "he_keras/__init__.py", "he_keras.py"])
def test_what_hides_the_package_is_named(tmp_path, name):
    path = tmp_path / name
    if path.suffix:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    else:
        path.mkdir()
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import he_keras_cli; "
        f"sys.path[0] = {str(tmp_path)!r}; sys.argv = ['he-keras', 'evaluate']; he_keras_cli.main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"error: {path} hides the package he_keras; run in another folder")


def test_flags_are_checked_before_tensorflow_is_loaded():
    """Each program, in one process: what it needs to know its flags takes no time."""
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import he_keras_cli\n"
        "he_keras_cli._put_off()\n"
        "from absl import flags\n"
        "from he_keras.programs import cli\n"
        "for name in he_keras_cli.PROGRAMS:\n"
        "    for flag in list(flags.FLAGS):\n"
        "        delattr(flags.FLAGS, flag)\n"
        "    for module in list(sys.modules):\n"
        "        if module.startswith('he_keras.programs.') and not module.endswith('.cli'):\n"
        "            del sys.modules[module]\n"
        "    sys.argv = [name, '--nonsense']\n"
        "    try:\n"
        "        cli.check_command(name)\n"
        "    except SystemExit as end:\n"
        "        print(name, end.code)\n"
        "print({'keras', 'tensorflow', 'he_keras.attacks.registry'} & set(sys.modules))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *ends, loaded = found.stdout.splitlines()
    assert ends == [f"{name} 2" for name in he_keras_cli.PROGRAMS], found.stderr
    assert loaded == "set()"
    assert all(line.startswith("error: Unknown flag") for line in found.stderr.splitlines())


def test_the_names_that_the_files_register_are_those_of_the_registries():
    """With them, a mistyped name is told before TensorFlow is loaded."""
    kinds = {
        "attacks": map(base_name, attacks.names()),
        "objectives": he.objectives.names(),
        "analysis": summaries(),
    }
    for folder, known in kinds.items():
        assert sorted(registered.entries(folder)) == sorted(known)
    registered.check_attacks(["pgd-20", "AutoAttack", "transfer:some.keras", "square-100"])
    for name in he.networks.names():
        registered.check_part("network", "networks", name)
    with pytest.raises(ValueError, match="Unknown network; .*mean 'resnet-18'?"):
        registered.check_part("network", "networks", "resnet-81")


def test_a_part_of_ones_own_may_have_any_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["he-keras evaluate", "--import=mine"])
    registered.check_attacks(["mine-3"])
    registered.check_overrides(["--config.network.name=mine"])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("--config.network.name=preact-resnet-81", "did you mean 'preact-resnet-18'"),
        ("--config.objective.name=pdg_at", "did you mean 'pgd_at'?"),
        ("--config.schedule.name=cosin", "did you mean 'cosine'?"),
        ("--config.head.kind=hee", "did you mean 'he'?"),
        ("--config.evaluation.attacks=('pdg-20',)", "did you mean 'pgd-20'?"),
    ],
)
def test_names_are_checked_before_data_is_read(run, tmp_path, monkeypatch, override, part):
    def read(*args, **kwargs):
        raise AssertionError("data was read")

    monkeypatch.setattr(he.data, "load", read)
    answer = run("train", "--config=quickstart_digits", override, f"--output_dir={tmp_path}/run")
    assert_one_line_error(answer, part)
    assert np.size(list(tmp_path.iterdir())) == 0


def test_of_a_long_list_of_names_the_nearest_are_shown():
    known = [f"entry-{number}" for number in range(100)]
    text = str(unknown_name("entry", "entry-111", known))
    assert "expected one of 100 names, such as entry-11, " in text and len(text) < 150
    assert "expected one of a, b; received" in str(unknown_name("letter", "c", ["a", "b"]))
