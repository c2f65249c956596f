"""`he-keras evaluate` beside the plain evaluation: shards, verification, comparison, protocols."""

import functools
import json
import pathlib
import shutil
import types

import evaluation_program as program
import numpy as np
import pytest
import small_limits
from programs import assert_one_line_error, run_here

import he_keras_cli


@pytest.fixture
def run(monkeypatch, capfd):
    small_limits.set_block_size(monkeypatch, program.BLOCK_SIZE)
    return functools.partial(run_here, monkeypatch, capfd)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    program.model().save(folder / "first.keras")
    kernel, bias = program.model().get_weights()
    second = type(program.model()).from_config(program.model().get_config())
    second.set_weights([kernel[:, ::-1][:, ::-1] * 0.5, bias * 0.5])
    second.save(folder / "second.keras")
    images, labels = program.examples()
    np.savez(folder / "data.npz", x_test=images, y_test=labels)
    return folder


def base(files, model="first"):
    return [
        f"--model={files / model}.keras",
        f"--data={files / 'data.npz'}",
        "--epsilon=0.06",
        "--attacks=fgsm,pgd-3",
        "--batch_size=10",
        "--nochecks",
    ]


def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def originals(files, tmp_path_factory):
    """What `evaluate` writes for the whole, and for two shards that are not merged."""
    folder = tmp_path_factory.mktemp("originals")
    silent = types.SimpleNamespace(readouterr=lambda: ("", ""))
    with pytest.MonkeyPatch.context() as patch:
        small_limits.set_block_size(patch, program.BLOCK_SIZE)
        for name, flags in (
            ("whole", []),
            ("shards", ["--shard=0/2"]),
            ("shards", ["--shard=1/2"]),
        ):
            given = [*base(files), f"--output_dir={folder / name}", *flags]
            assert run_here(patch, silent, "evaluate", *given)[0] == 0
    return folder


@pytest.fixture
def evaluated(originals, tmp_path):
    return shutil.copytree(originals / "whole", tmp_path / "whole")


@pytest.mark.slow
def test_shards_and_merge(run, files, originals, evaluated, tmp_path):
    folder = shutil.copytree(originals / "shards", tmp_path / "shards")
    # A shard that is done is not attacked again.
    code, out, err = run("evaluate", *base(files), f"--output_dir={folder}", "--shard=1/2")
    assert code == 0, err
    assert out.splitlines()[-1].startswith("Shard 1/2 is done; he-keras merge")
    assert not (folder / "report.json").exists()
    code, out, err = run("merge", *base(files), f"--output_dir={folder}")
    assert code == 0, err
    assert out.splitlines()[-1] == f"Report: {folder / 'report.html'}"
    with (
        np.load(folder / "per_example.npz") as one,
        np.load(evaluated / "per_example.npz") as other,
    ):
        for name in other.files:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow
def test_a_folder_of_another_evaluation_is_refused_with_the_difference(run, files, evaluated):
    out = f"--output_dir={evaluated}"
    before = (evaluated / "report.json").read_text()
    changed = [argument for argument in base(files) if not argument.startswith("--attacks")]
    answer = run("evaluate", *changed, "--attacks=pgd-3", out)
    assert_one_line_error(answer, "another evaluation", "received attacks: fgsm, pgd-3 -> pgd-3 (")
    answer = run("evaluate", *base(files, "second"), out)
    assert_one_line_error(answer, "received weights: others (")
    assert (evaluated / "report.json").read_text() == before


@pytest.mark.slow
def test_a_folder_without_records_is_no_evaluation(run, files, evaluated):
    for records in filter(pathlib.Path.is_dir, (evaluated / "adversarial").iterdir()):
        shutil.rmtree(records)
    answer = run("verify", *base(files), f"--output_dir={evaluated}")
    assert_one_line_error(answer, "No evaluation in this folder", "evaluate into it first")


def test_missing_records_do_not_verify(run, files, evaluated):
    for path in evaluated.glob("adversarial/block-*/*.npz"):
        path.unlink()
    code, out, err = run("verify", *base(files), f"--output_dir={evaluated}")
    assert code == 1
    assert "DO NOT HOLD" in out and "Records are missing" in out


def test_verify(run, files, evaluated):
    arguments = [*base(files), f"--output_dir={evaluated}"]
    code, out, err = run("verify", *arguments)
    assert code == 0, err
    broken = sum(row["num_broken"] for row in report(evaluated)["attacks"])
    assert broken > 0
    assert f"hold: of {broken} adversarial images 0 are" in out


def test_verification_fails_for_another_model(run, files, evaluated, tmp_path):
    kernel, bias = program.model().get_weights()
    other = type(program.model()).from_config(program.model().get_config())
    other.set_weights([kernel[:, [1, 2, 0]], bias[[1, 2, 0]]])
    other.save(tmp_path / "other.keras")
    arguments = [*base(tmp_path.parent / "x"), f"--output_dir={evaluated}"]
    arguments[:2] = [f"--model={tmp_path / 'other.keras'}", f"--data={files / 'data.npz'}"]
    code, out, err = run("verify", *arguments)
    assert code == 1
    assert "DO NOT HOLD" in out


def test_compare(run, files, evaluated, tmp_path):
    other = tmp_path / "other"
    code, out, err = run("evaluate", *base(files, "second"), f"--output_dir={other}")
    assert code == 0, err
    code, out, err = run("compare", evaluated, other, f"--output_dir={tmp_path}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("Accuracy; linf, epsilon 0.06, pixels 0 to 1; the same ")
    assert lines[-2].startswith("  A minus B: +0.00 points, 95 % interval ")
    assert lines[-1] == f"Comparison: {tmp_path / 'comparison.html'}"
    assert (tmp_path / "comparison.html").stat().st_size > 10_000


def for_transfer(files):
    """The flags of an evaluation that a transfer matrix has too."""
    left_out = ("--model", "--attacks", "--nochecks")
    return [each for each in base(files) if not each.startswith(left_out)]


@pytest.mark.parametrize("flag", ["--protocol=paper", "--nochecks", "--mode=survivors"])
def test_transfer_refuses_what_it_would_ignore(run, files, tmp_path, flag):
    models = [files / "first.keras", files / "second.keras"]
    code, out, err = run("transfer", *models, *for_transfer(files), flag)
    assert code != 0 and flag.lstrip("-").partition("=")[0].removeprefix("no") in err


def test_transfer(run, files, tmp_path):
    arguments, models = for_transfer(files), [files / "first.keras", files / "second.keras"]
    code, out, err = run(
        "transfer", *models, *arguments, "--attacks=pgd-2", f"--output_dir={tmp_path}"
    )
    assert code == 0, err
    (matrix,) = json.loads((tmp_path / "transfer.json").read_text())["matrices"]
    assert matrix["names"] == ["first.keras", "second.keras"]
    # Half the scale: the same gradient signs, the same images, the same verdicts.
    assert np.ptp(matrix["robust_accuracy"]) == 0
    assert "rows: crafted for" in out


def test_transfer_goes_into_a_report_that_is_there(run, files, evaluated):
    arguments, models = for_transfer(files), [files / "first.keras", files / "second.keras"]
    chosen = [*arguments, "--attacks=pgd-2", f"--output_dir={evaluated}"]
    code, out, err = run("transfer", *models, *chosen)
    assert code == 0, err
    assert report(evaluated)["transfer"]["names"] == ["first.keras", "second.keras"]
    assert "second.keras" in (evaluated / "report.html").read_text()


def test_transfer_at_another_radius_does_not_go_into_a_report(run, files, evaluated):
    models = [files / "first.keras", files / "second.keras"]
    data = f"--data={files / 'data.npz'}"
    chosen = [data, "--epsilon=0.03", "--attacks=pgd-2", f"--output_dir={evaluated}"]
    answer = run("transfer", *models, *chosen)
    assert_one_line_error(answer, "The report is of another evaluation", "epsilon: 0.06 -> 0.03")
    assert not (evaluated / "transfer.json").exists()


def test_a_protocol_says_so(run, files, tmp_path):
    arguments = [*base(files)[:2], "--nochecks", "--protocol=he-table-4", "--batch_size=50"]
    code, out, err = run("evaluate", *arguments, f"--output_dir={tmp_path}")
    assert code == 0, err
    content = report(tmp_path)
    assert content["protocol"].startswith("Evaluation settings of Table 4 of the HE paper")
    assert content["threat"]["epsilon"] == 4 / 255
    assert content["mode"] == "individual"
    names = [row["name"] for row in content["attacks"]]
    assert names == ["pgd-10", "pgd-50", "cw-linf-20"]
    assert "Protocol he-table-4: Evaluation settings" in out


@pytest.mark.slow
def test_corruptions_are_added(run, tmp_path, monkeypatch):
    images = np.random.RandomState(0).rand(20, 32, 32, 3).astype("float32")
    labels = np.arange(20) % 2
    images[labels == 1] *= 0.4
    np.savez(tmp_path / "data.npz", x_test=images, y_test=labels)
    import keras

    model = keras.Sequential(
        [keras.Input((32, 32, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    )
    model.layers[1].set_weights([np.array([[3.0, -3.0]] * 3), np.array([-3.0, 3.0])])
    model.save(tmp_path / "model.keras")
    code, out, err = run(
        "evaluate",
        f"--model={tmp_path / 'model.keras'}",
        f"--data={tmp_path / 'data.npz'}",
        "--attacks=fgsm",
        "--nochecks",
        "--corruptions=generated",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 0, err
    assert len(report(tmp_path / "out")["corruptions"]["accuracy"]) == 19
    assert "brightness" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--shard=2/2"], ["Invalid shard", "0 <= i < n", "(2, 2)"]),
        (["--shard=half"], ["Invalid --shard; expected i/n", "half"]),
        (["somewhere"], ["Unknown argument; expected only --flags", "somewhere"]),
        (["--protocol=paper"], ["A protocol fixes its settings", "--attacks, --epsilon"]),
    ],
)
def test_mistakes_end_in_one_line(run, files, tmp_path, arguments, parts):
    answer = run("evaluate", *base(files), f"--output_dir={tmp_path / 'new'}", *arguments)
    assert_one_line_error(answer, *parts)
    assert not list(tmp_path.glob("new/*.json"))


@pytest.mark.parametrize(
    ("program", "paths", "parts"),
    [
        ("merge", [], ["not complete", "expected the batches of every shard"]),
        ("verify", [], ["Not the folder of an evaluation"]),
        ("transfer", ["nowhere"], ["nowhere"]),
        ("transfer", ["one", "one"], ["Models must differ; expected no path twice"]),
    ],
)
def test_mistakes_of_the_programs_beside_it(run, files, tmp_path, program, paths, parts):
    chosen = for_transfer(files) if program == "transfer" else base(files)
    answer = run(program, *paths, *chosen, f"--output_dir={tmp_path / 'new'}")
    assert_one_line_error(answer, *parts)
    assert not list(tmp_path.glob("new/*.json"))


@pytest.mark.parametrize("program", ["evaluate", "merge", "verify"])
def test_a_model_and_its_data_are_asked_for(run, tmp_path, program):
    out = f"--output_dir={tmp_path}"
    assert_one_line_error(run(program, out), "No model; expected --run=FOLDER or --model=FILE")
    assert_one_line_error(run(program, "--model=x.keras", out), "No data set; expected --data=NAME")


def test_comparing_takes_folders_of_reports(run):
    told = run("compare", "nowhere", "elsewhere")
    assert_one_line_error(told, "Cannot read report.json", "nowhere")
    assert_one_line_error(run("compare"), "Nothing to compare; expected two or more")


@pytest.mark.parametrize("flag", ["--compare", "-compare", "--compare=true"])
def test_a_former_flag_is_the_program(flag, capsys):
    argv = ["he-keras evaluate", "a", flag, "b"]
    assert he_keras_cli.present_form("evaluate", argv) == (
        "compare",
        ["he-keras compare", "a", "b"],
    )
    assert capsys.readouterr().err == "note: evaluate --compare is now: he-keras compare\n"
    assert he_keras_cli.present_form("export", argv) == ("export", argv)
    others = ["he-keras evaluate", "--compare=no", "--shard=0/2", "transfer"]
    assert he_keras_cli.present_form("evaluate", others) == ("evaluate", others)


def test_a_former_flag_runs_the_program_and_says_so(run, files, originals, tmp_path):
    """`evaluate --merge`, `--verify`, `--compare` and `--transfer` still work, with one notice."""
    shutil.copytree(originals / "shards", tmp_path / "out")
    arguments = [*base(files), f"--output_dir={tmp_path / 'out'}"]
    code, out, err = run("evaluate", *arguments, "--merge")
    assert code == 0, err
    assert err.splitlines()[0] == "note: evaluate --merge is now: he-keras merge"
    assert out.splitlines()[-1] == f"Report: {tmp_path / 'out' / 'report.html'}"
    code, out, err = run("evaluate", *arguments, "--verify")
    assert code == 0 and "hold" in out
    assert err.splitlines()[0] == "note: evaluate --verify is now: he-keras verify"
    code, _, err = run("evaluate", "--compare", tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert err.splitlines()[0] == "note: evaluate --compare is now: he-keras compare"
    assert "Cannot read report.json" in err.splitlines()[1]


def test_a_protocol_for_unknown_data_lists_all(run, files, tmp_path):
    arguments = [*base(files)[:2], "--protocol=paper", f"--output_dir={tmp_path}"]
    assert_one_line_error(run("evaluate", *arguments), "No paper's main table", "he-table-2-fab")
