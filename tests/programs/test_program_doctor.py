"""`he-keras doctor`: what it shows, the problems that it finds, and an import that fails."""

import importlib.metadata
import sys

import pytest

import he_keras as he
import he_keras_cli
from he_keras import requirements

NEEDED = {"keras": ">=3.12,<4", "tensorflow": ">=2.20", "numpy": ""}


@pytest.fixture
def versions(monkeypatch):
    """What pip knows, to be changed by a test."""
    known = {"keras": "3.15.1", "tensorflow": "2.21.0", "numpy": "2.4.6"}
    known["he_keras"] = he.__version__
    lines = [f"{name}{wanted}" for name, wanted in NEEDED.items()]
    lines += ["orjson<4,>=3.10; extra == 'serve'", "ruff>=0.12; extra == 'dev'"]

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    return known


def test_packages_that_do_not_fit_are_problems(versions):
    assert requirements.problems(requirements.packages()) == []
    versions["tensorflow"] = "2.19.0"
    del versions["numpy"]
    versions["orjson"] = "2.0"
    found = requirements.problems(requirements.packages())
    assert found == [
        "tensorflow does not fit; expected >=2.20; received 2.19.0: "
        "pip install -U 'tensorflow>=2.20'",
        "numpy does not fit; expected any; received none: pip install -U 'numpy'",
        "orjson does not fit; expected >=3.10,<4; received 2.0: pip install -U 'orjson>=3.10,<4'",
    ]
    table = requirements.table(requirements.packages())
    assert "tensorflow            2.19.0      DOES NOT FIT, >=2.20" in table
    assert "orjson" in table and "[serve]" in table and "ruff" not in table


def test_a_sound_machine(run, versions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    for name in ("cifar10/3.0.2", "glue/cola/2.0.0"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "dataset_info.json").touch()
    code, out, err = run("doctor", "--nospeed", f"--data_dir={tmp_path / 'data'}")
    assert code == 0, out
    assert out.startswith(f"he_keras {he.__version__} in ")
    assert f"prepared by TFDS in {tmp_path / 'data'}: cifar10, glue" in out
    assert "/physical_device:CPU:0" in out and "Speed" not in out
    assert out.endswith("No known problem.\n")


def test_problems_end_with_1(run, versions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "he_keras").mkdir()
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    versions["he_keras"] = "0.0.9"
    with he.cpu.disabled():
        code, out, err = run("doctor", "--nospeed")
    assert code == 1
    assert f"no folder of prepared TFDS data sets: {tmp_path / 'none'}" in out
    assert "note: HE_KERAS_CPU_TUNING=0 turns off" in out
    problems = [line for line in out.splitlines() if line.startswith("PROBLEM: ")]
    assert [any(part in line for line in problems) for part in ("0.0.9", "hides", "GPU")] == [
        True,
        True,
        True,
    ]


def test_the_speed_stands_beside_the_stored_one(run, versions, tmp_path, monkeypatch):
    from he_keras.benchmarks import training

    class Result:
        seconds = {"he_keras": 0.25}
        share_of_bound = 0.31

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "measure_cell", lambda *_: Result)
    out = run("doctor")[1]
    assert "0.250 s a step, 256 images/s" in out
    assert "take 0.31 of that, stored 0.87" in out and "much slower than stored" in out


@pytest.mark.slow
def test_the_speed_is_measured():
    from forked_programs import Program, run_script

    out, err = Program(run_script, "tools/doctor.py").communicate()
    (line,) = [line for line in out.splitlines() if "its convolutions alone take" in line]
    assert 0 < float(line.split()[4]) < 10


def test_an_installation_that_cannot_be_imported(versions, monkeypatch, capsys):
    versions["keras"] = "2.15.0"
    monkeypatch.setattr(sys, "argv", ["he-keras", "doctor"])
    # Python refuses to import what is None.
    monkeypatch.setitem(sys.modules, "he_keras.programs", None)
    with pytest.raises(SystemExit) as end:
        he_keras_cli.main()
    out = capsys.readouterr().out
    assert end.value.code == 1
    assert "PROBLEM: keras does not fit; expected >=3.12,<4; received 2.15.0" in out
    assert "PROBLEM: he_keras cannot be imported: ModuleNotFoundError" in out
