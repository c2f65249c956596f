"""The command-line programs: what they do, and that every mistake ends in one line."""

import importlib
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from absl import app, flags

import he_keras as he
from he_keras_tools import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS = ("train", "evaluate", "export", "quickstart")
TINY = f"--config={ROOT / 'tests' / 'tiny_config.py'}"
SMALL = f"--config={ROOT / 'configs' / 'cifar10_small.py'}"


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a program in this process; returns exit code, standard output, standard error."""

    def run_program(program, *arguments):
        before = set(flags.FLAGS)
        arguments = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", [f"he-keras {program}", *arguments])
        # "config_config": what the last configuration file defined.
        for module_name in (f"he_keras_tools.{program}", "config_config"):
            sys.modules.pop(module_name, None)
        code = 0
        try:
            module = importlib.import_module(f"he_keras_tools.{program}")
            module.main(cli.parse_flags(module.main, sys.argv))
        except SystemExit as end:
            code = end.code
        finally:
            # Every program has an --output_dir of its own.
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
        return code, *capfd.readouterr()

    return run_program


def run_process(*command, **options):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def assert_one_line_error(answer, *parts):
    code, out, err = answer
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run folder of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config.get_config()
    config.train.epochs = 1
    he.experiment.run_training(config, folder)
    return folder


def save_npz(path, shape=(40, 8, 8, 1), num_classes=10, spoil=False):
    images = np.random.RandomState(0).rand(*shape).astype("float32")
    if spoil:
        images[3, 2, 1, 0] = np.nan
    np.savez(path, images=images, labels=np.arange(len(images)) % num_classes)
    return path


# Help and usage


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(run, program):
    code, out, err = run(program, "--help")
    assert (code, err) == (0, "")
    assert "--output_dir" in out
    assert out.strip().startswith(sys.modules[f"he_keras_tools.{program}"].__doc__.strip()[:40])


def test_installed_command():
    command = pathlib.Path(sys.executable).with_name("he-keras")
    answer = run_process(command, "train", "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--config" in answer.stdout and "--[no]smoke" in answer.stdout
    answer = run_process(command, "trian")
    assert_one_line_error(
        (answer.returncode, answer.stdout, answer.stderr),
        "Unknown program; expected he-keras train|evaluate|export|quickstart; received trian",
    )
    answer = run_process(command, "--help")
    assert answer.returncode == 0 and answer.stdout.startswith("usage: he-keras train|evaluate")


def test_command_line_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/train.py", "--output_dir=my runs"])
    assert cli.command_line() == "python tools/train.py '--output_dir=my runs'"
    monkeypatch.setattr(sys, "argv", ["he-keras train", "--smoke"])
    assert cli.command_line() == "he-keras train --smoke"


def test_ctrl_c_before_training_is_no_traceback(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupt)
    with pytest.raises(SystemExit) as end:
        cli.run(lambda argv: None)
    assert end.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().out == "Interrupted\n"


# Real processes: nothing but the one line may appear, TensorFlow's own messages included


@pytest.mark.parametrize(
    ("program", "arguments", "parts"),
    [
        (
            "train",
            ["--config=configs/quickstart_digits.py", "--config.head.scael=10"],
            ["Unknown configuration key", "scale", "margin", "num_classes", "head.scael"],
        ),
        (
            "train",
            ["--config=configs/quickstart_digits.py", "--config.data.name={spoilt}"],
            ["outside [0, 1] or hold NaN", "images.min()=nan"],
        ),
        (
            "evaluate",
            ["--model={missing}.keras", "--data=digits"],
            ["No model; expected an existing .keras file", "missing.keras"],
        ),
    ],
)
def test_mistakes_in_a_process(tmp_path, program, arguments, parts):
    places = {"spoilt": save_npz(tmp_path / "x.npz", spoil=True), "missing": tmp_path / "missing"}
    arguments = [argument.format(**places) for argument in arguments]
    folder = tmp_path / "run"
    answer = run_process(
        sys.executable, f"tools/{program}.py", *arguments, f"--output_dir={folder}"
    )
    assert_one_line_error((answer.returncode, answer.stdout, answer.stderr), *parts)
    assert not folder.exists()


# train: mistakes


@pytest.fixture
def no_training(monkeypatch):
    def fit(*args, **kwargs):
        raise AssertionError("training began")

    monkeypatch.setattr(he.HEAdversarialModel, "fit", fit)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["No configuration; expected --config=configs/NAME.py"]),
        (["--config=nowhere.py"], ["nowhere.py", "No such file"]),
        ([TINY, "--colour=red"], ["Unknown command line flag 'colour'"]),
        ([TINY, "extra"], ["Unknown argument", "received extra"]),
        ([TINY, "--config.sede=1"], ["Unknown configuration key", "seed", "received sede"]),
        (
            [TINY, "--config.objective.steps=1"],
            ["name, num_steps, random_start, step_size", "received objective.steps"],
        ),
        ([TINY, "--config.seed.x=1"], ["Not a section; expected --config.seed=..."]),
        ([TINY, "--config.head.scale=big"], ["--config.head.scale=big"]),
        ([TINY, "--config.head.scale=-1"], ["scale=-1"]),
        ([TINY, "--config.head.kind=cos"], ["Unknown head", "m_he", "'cos'"]),
        ([TINY, "--config.train.epochs=2.5"], ["--config.train.epochs=2.5"]),
        ([TINY, "--config.train.epochs=0"], ["train.epochs=0"]),
        ([TINY, "--config.train.batch_size=0"], ["train.batch_size=0"]),
        ([TINY, "--config.threat.epsilon=8/0"], ["8/0"]),
        ([TINY, "--config.threat.epsilon=-0.1"], ["-0.1"]),
        ([TINY, "--config.threat.epsilon=2"], ["2"]),
        ([TINY, "--config.threat.epsilon=eight"], ["eight"]),
        ([TINY, "--config.threat.norm=l3"], ["l3"]),
        ([TINY, "--config.head.num_classes=7"], ["Class count mismatch", "num_classes=10", "=7"]),
        ([TINY, "--config.network.input_shape=(9,9,1)"], ["Image shape mismatch", "(9, 9, 1)"]),
        ([TINY, "--config.network.name=resnet-19"], ["resnet-19", "resnet-50"]),
        ([TINY, "--config.data.augmentation=rotate"], ["unknown augmentation", "'rotate'"]),
        ([TINY, "--config.data.validation_examples=5000"], ["validation_examples=5000"]),
        ([TINY, "--config.evaluation.attacks=('gpd-5',)"], ["Unknown attack", "pgd-K", "gpd-5"]),
        ([TINY, "--config.evaluation.validation_attack=gpd"], ["Unknown attack", "gpd"]),
        ([TINY, "--config.schedule.name=straight"], ["Unknown schedule", "straight"]),
        ([TINY, "--config.train.dtype=half"], ["Unknown dtype", "half"]),
        ([SMALL, "--config.data.data_dir={tmp}"], ["'cifar10' is not prepared", "{tmp}"]),
        ([TINY, "--config.data.name={tmp}/no.npz"], ["no.npz"]),
        ([TINY, "--config.data.name={nan}"], ["hold NaN"]),
        ([TINY, "--config.data.name={large}"], ["Image shape mismatch", "(9, 9, 1)"]),
        ([TINY, "--config.data.name={few}"], ["Class count mismatch", "num_classes=3"]),
    ],
)
def test_mistakes_before_training(run, tmp_path, no_training, arguments, parts):
    places = {
        "tmp": tmp_path,
        "nan": save_npz(tmp_path / "nan.npz", spoil=True),
        "large": save_npz(tmp_path / "large.npz", shape=(40, 9, 9, 1)),
        "few": save_npz(tmp_path / "few.npz", num_classes=3),
    }
    folder = tmp_path / "run"
    answer = run("train", *(each.format(**places) for each in arguments), f"--output_dir={folder}")
    assert_one_line_error(answer, *(part.format(**places) for part in parts))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def get_config(", ["never closed"]),
        ("x = 1", ["get_config"]),
        (
            "from he_keras.experiment import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.train.epoch = 3\n"
            "    return config\n",
            ["epoch", "epochs", "locked"],
        ),
        (
            "from he_keras.experiment import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    with config.unlocked():\n"
            "        config.train.epoch = 3\n"
            "    return config\n",
            ["train.[batch_size", "epochs", "received unknown=['epoch']"],
        ),
    ],
    ids=["syntax", "no function", "locked", "unlocked"],
)
def test_mistakes_in_a_configuration_file(run, tmp_path, no_training, text, parts):
    path = tmp_path / "mine.py"
    path.write_text(text)
    answer = run("train", f"--config={path}", f"--output_dir={tmp_path / 'run'}")
    assert_one_line_error(answer, *parts)
    assert not (tmp_path / "run").exists()


def test_unwritable_folder(run, tmp_path, no_training):
    (tmp_path / "file").write_text("")
    answer = run("train", TINY, f"--output_dir={tmp_path / 'file' / 'run'}")
    assert_one_line_error(answer, "Cannot write to the output folder", str(tmp_path / "file"))
    answer = run("train", TINY, f"--output_dir={tmp_path / 'file'}")
    assert_one_line_error(answer, "Cannot write to the output folder")
    assert (tmp_path / "file").read_text() == ""


def test_folder_of_another_run(run, trained, no_training):
    before = sorted(trained.rglob("*"))
    answer = run("train", TINY, f"--output_dir={trained}", "--config.head.scale=9")
    assert_one_line_error(answer, "another configuration", "head.scale: 15.0 -> 9.0")
    assert sorted(trained.rglob("*")) == before


@pytest.mark.parametrize("name", ["checkpoints/latest.npz", "config.json", "environment.json"])
def test_damaged_run_folder(run, tmp_path, no_training, name):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("rubbish")
    answer = run("train", TINY, f"--output_dir={folder}")
    assert_one_line_error(answer, str(folder / name))
    assert (folder / name).read_text() == "rubbish"


# train: runs


def test_smoke_then_nothing_left(run, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run("train", TINY, "--smoke", f"--output_dir={folder}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("epoch 1/1: accuracy ") and "val_robust_accuracy" in lines[0]
    assert lines[-1] == f"Saved {folder / 'model.keras'}"
    # The progress bar: batches done, time taken and left, loss.
    assert "2/2 [" in err and "<" in err and "loss=" in err
    assert json.loads((folder / "config.json").read_text())["name"] == "tiny_smoke"

    weights = he.load_model(folder / "model.keras").get_weights()
    code, out, err = run("train", TINY, "--smoke", f"--output_dir={folder}")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"Nothing left to train in {folder}"
    again = he.load_model(folder / "model.keras").get_weights()
    for now, then in zip(again, weights, strict=True):
        np.testing.assert_array_equal(now, then)


def test_diverging_training_is_one_line_and_exit_code_1(run, tmp_path):
    code, out, err = run(
        "train",
        TINY,
        f"--output_dir={tmp_path / 'run'}",
        "--config.head.kind=linear",
        "--config.optimizer.learning_rate=1e30",
    )
    assert code == 1
    assert err.splitlines()[-1].startswith("error: The loss is not finite; expected a number")
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "model.keras").exists()


# evaluate


def read_report(folder):
    return json.loads((folder / "report.json").read_text())


def test_evaluate_a_run(run, trained):
    code, out, err = run("evaluate", f"--run={trained}")
    assert code == 0, err
    report = read_report(trained / "evaluation")
    assert report["num_examples"] == 30  # The configuration's test_examples.
    assert [row["name"] for row in report["attacks"]] == ["fgsm", "pgd-2"]
    assert report["threat"]["epsilon"] == 0.1
    assert "(worst case)" in out and "n = 30" in out
    assert out.splitlines()[-1] == f"Report: {trained / 'evaluation' / 'report.json'}"
    with np.load(trained / "evaluation" / "per_example.npz") as flags_:
        assert set(flags_.files) == {"labels", "clean", "fgsm", "pgd-2"}


def test_evaluate_flags_override_the_run(run, trained, tmp_path):
    code, _, err = run(
        "evaluate",
        f"--run={trained}",
        f"--model={trained / 'checkpoints' / 'best.keras'}",
        "--attacks=pgd-1,fgsm",
        "--epsilon=4/255",
        "--step_size=0.002",
        "--num_examples=13",
        "--batch_size=8",
        f"--output_dir={tmp_path}",
    )
    assert code == 0, err
    report = read_report(tmp_path)
    assert report["num_examples"] == 13 and report["threat"]["epsilon"] == 4 / 255
    pgd, fgsm = report["attacks"]
    assert pgd["settings"]["step_size"] == 0.002 and pgd["settings"]["batch_size"] == 8
    assert fgsm["settings"]["step_size"] == 4 / 255


def test_evaluate_a_model_file_on_other_data(run, trained, tmp_path):
    data = save_npz(tmp_path / "mine.npz")
    code, _, err = run(
        "evaluate",
        f"--model={trained / 'model.keras'}",
        f"--data={data}",
        "--attacks=fgsm",
        "--epsilon=0.1",
        "--logit_scale=unit",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 0, err
    report = read_report(tmp_path / "out")
    assert report["num_examples"] == 40
    # A cross-entropy attack at scale 1 comes with a scale-free one beside it.
    names = [(row["name"], row["settings"]["logit_scale"]) for row in report["attacks"]]
    assert names == [("fgsm", "unit"), ("cw-linf-20", "model")]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["No model; expected --run=FOLDER or --model=FILE"]),
        (["--model=a.keras"], ["No data set; expected --data=NAME"]),
        (["--run={tmp}/none"], ["Cannot read config.json", "{tmp}/none"]),
        (["--run={run}", "--model={tmp}/none.keras"], ["No model", "{tmp}/none.keras"]),
        (["--run={run}", "--model={run}/history.csv"], ["No model", "history.csv"]),
        (["--run={run}", "--model={damaged}"], ["Cannot load the model", "{damaged}"]),
        (["--run={run}", "--attacks=pdg-20"], ["Unknown attack", "fgsm", "pgd-K", "'pdg-20'"]),
        (["--run={run}", "--attacks=pgd-0"], ["num_steps=0"]),
        (["--run={run}", "--attacks=fgsm,fgsm"], ["different names"]),
        (["--run={run}", "--step_size=-1"], ["-1"]),
        (["--run={run}", "--step_size=tiny"], ["tiny"]),
        (["--run={run}", "--epsilon=1/0"], ["1/0"]),
        (["--run={run}", "--norm=l0"], ["l0"]),
        (["--run={run}", "--logit_scale=huge"], ["Invalid logit_scale", "huge"]),
        (["--run={run}", "--batch_size=0"], ["batch_size=0"]),
        (["--run={run}", "--batch_size=x"], ["batch_size=x"]),
        (["--run={run}", "--num_examples=-3"], ["num_examples", "-3"]),
        (["--run={run}", "--data=cifar10", "--data_dir={tmp}"], ["'cifar10' is not prepared"]),
        (["--run={run}", "--data={large}"], ["(None, 8, 8, 1)", "9"]),
        (["--run={run}", "--data={many}"], ["Label outside the classes; expected 0..9"]),
        (["--run={run}", "--data={nan}"], ["NaN"]),
        (["--run={run}", "--output_dir={damaged}/x"], ["Cannot write the report", "{damaged}/x"]),
    ],
)
def test_mistakes_in_evaluation(run, trained, tmp_path, arguments, parts):
    damaged = tmp_path / "damaged.keras"
    damaged.write_text("rubbish")
    places = {
        "tmp": tmp_path,
        "run": trained,
        "damaged": damaged,
        "nan": save_npz(tmp_path / "nan.npz", spoil=True),
        "large": save_npz(tmp_path / "large.npz", shape=(8, 9, 9, 1)),
        "many": save_npz(tmp_path / "many.npz", num_classes=12),
    }
    arguments = [each.format(**places) for each in arguments]
    if not any("--output_dir" in each for each in arguments):
        arguments.append(f"--output_dir={tmp_path / 'out'}")
    answer = run("evaluate", *arguments)
    assert_one_line_error(answer, *(part.format(**places) for part in parts))
    assert not (tmp_path / "out" / "report.json").exists()


# export


@pytest.mark.parametrize("from_file", [True, False])
def test_export(run, trained, tmp_path, from_file):
    names = ",".join("abcdefghij")
    code, out, err = run(
        "export",
        f"--model={trained / 'model.keras' if from_file else trained}",
        f"--output_dir={tmp_path}",
        f"--class_names={names}",
    )
    assert (code, err) == (0, "")
    assert out == f"SavedModel: {tmp_path / '1'}\n"
    images = np.random.RandomState(0).rand(3, 8, 8, 1).astype("float32")
    answer = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"](
        images=tf.constant(images)
    )
    expected = he.load_model(trained / "model.keras")(images, training=False)
    np.testing.assert_allclose(answer["logits"], expected, atol=1e-5)
    labels = (tmp_path / "1" / "assets.extra" / "labels.txt").read_text().split()
    assert labels == list("abcdefghij")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["Missing flag; expected --model=... and --output_dir=..."]),
        (["--model={tmp}/x.keras", "--output_dir={tmp}/out"], ["No model", "x.keras"]),
        (["--model={tmp}", "--output_dir={tmp}/out"], ["No model", "model.keras"]),
        (
            ["--model={run}", "--output_dir={tmp}/out", "--class_names=a,b"],
            ["Class names do not match", "expected 10", "received 2"],
        ),
        (["--model={run}", "--output_dir={run}/history.csv"], ["history.csv"]),
    ],
)
def test_mistakes_in_export(run, trained, tmp_path, arguments, parts):
    places = {"tmp": tmp_path, "run": trained}
    answer = run("export", *(each.format(**places) for each in arguments))
    assert_one_line_error(answer, *parts)
    assert not (tmp_path / "out").exists()
