"""Every program on a Keras classifier with a softmax at the end and pixels in 0..255."""

import json

import keras
import numpy as np
import pytest
from programs import assert_one_line_error, run_here

import he_keras as he

CLASSES = 3


def ordinary():
    """Says which of the three pixels is the brightest, confidently for pixels in 0..255 only."""
    dense = keras.layers.Dense(CLASSES, "softmax")
    layers = [keras.Input((1, 1, CLASSES)), keras.layers.Flatten(), dense]
    model = keras.Sequential(layers, name="mine")
    dense.set_weights([0.1 * np.eye(CLASSES), np.zeros(CLASSES)])
    return model


def examples():
    random = np.random.RandomState(0)
    labels = random.randint(CLASSES, size=60)
    images = 80 * np.eye(CLASSES)[labels] + random.randint(100, size=(60, CLASSES))
    return images.astype("uint8")[:, None, None], labels


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinary")
    ordinary().save(folder / "mine.keras")
    images, labels = examples()
    np.savez(folder / "data.npz", x_test=images, y_test=np.eye(CLASSES)[labels])
    return folder


def flags_of(files, *others):
    model, data = f"--model={files / 'mine.keras'}", f"--data={files / 'data.npz'}"
    return [model, data, "--epsilon=8/255", *others]


DONE = "softmax removed; images in 0..1 times 255"


@pytest.fixture(scope="module")
def evaluated(files, tmp_path_factory):
    """The folder of an evaluation, and what it printed."""
    folder = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.warns(UserWarning, match="One-hot"):
        flags = flags_of(files, "--nochecks", "--attacks=cw-linf-5", f"--output_dir={folder}")
        assert run_here(monkeypatch, _NoCapture(), "evaluate", *flags)[0] == 0
    return folder


class _NoCapture:
    def readouterr(self):
        return "", ""


def test_evaluate_finds_out_what_the_model_is(evaluated):
    report = json.loads((evaluated / "report.json").read_text())
    images, labels = examples()
    answers = ordinary().predict(images.astype("float32"), verbose=0)
    assert report["clean_accuracy"] == pytest.approx((answers.argmax(axis=1) == labels).mean())
    assert report["settings"]["model"]["conversion"] == DONE
    # A perturbation moves each of two pixels by 8 grey levels.
    rival = np.max(images[:, 0, 0] - 1000.0 * np.eye(CLASSES)[labels], axis=1)
    ahead = images[np.arange(60), 0, 0, labels] - rival
    assert report["worst_case"] == pytest.approx((ahead > 16).mean(), abs=1 / 60)


@pytest.mark.filterwarnings("ignore:One-hot")
def test_evaluate_says_it_in_one_line_and_verify_follows(run, files, evaluated):
    flags = flags_of(files, "--nochecks", "--attacks=cw-linf-5", f"--output_dir={evaluated}")
    code, out, err = run("evaluate", *flags)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("Model: ")]
    assert line.startswith(f"Model: {DONE} (") and "of 60 clean images right" in line
    code, out, err = run("verify", *flags)
    assert code == 0 and "The recorded verdicts hold" in out, err


@pytest.mark.filterwarnings("ignore:One-hot")
def test_a_flag_overrides_what_would_be_found(run, files, tmp_path):
    flags = flags_of(files, "--nochecks", "--attacks=cw-linf-5", f"--output_dir={tmp_path}")
    code, out, err = run("evaluate", *flags, "--pixels=0..1", "--outputs=probabilities")
    assert code == 0, err
    assert "Model: softmax removed (pixels=0..1 was given)" in out


@pytest.mark.filterwarnings("ignore:One-hot")
def test_transfer_takes_ordinary_models(run, files, tmp_path):
    ordinary().save(tmp_path / "other.keras")
    code, out, err = run(
        "transfer",
        files / "mine.keras",
        tmp_path / "other.keras",
        *flags_of(files, f"--output_dir={tmp_path}")[1:],
        "--attacks=bim-2",
        "--num_examples=20",
    )
    assert code == 0, err
    assert out.count(DONE) == 2


@pytest.mark.filterwarnings("ignore:One-hot")
def test_members_of_an_ensemble_and_substitutes_are_wrapped_too(run, files, tmp_path):
    ordinary().save(tmp_path / "other.keras")
    mine, other = files / "mine.keras", tmp_path / "other.keras"
    flags = [f"--ensemble={mine},{other}", *flags_of(files)[1:], f"--output_dir={tmp_path}"]
    code, out, err = run("evaluate", "--nochecks", *flags, f"--attacks=transfer:{mine}")
    assert code == 0, err
    assert f"Member 1: {DONE}" in out and f"Member 2: {DONE}" in out
    assert f"transfer:{mine}: {DONE}" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["model"]["conversion"] == DONE
    images, labels = examples()
    answers = ordinary().predict(images.astype("float32"), verbose=0)
    assert report["clean_accuracy"] == pytest.approx((answers.argmax(axis=1) == labels).mean())
    # Two equal members and their equal as a substitute: no other attack could be stronger.
    rival = np.max(images[:, 0, 0] - 1000.0 * np.eye(CLASSES)[labels], axis=1)
    ahead = images[np.arange(60), 0, 0, labels] - rival
    assert report["worst_case"] == pytest.approx((ahead > 16).mean(), abs=2 / 60)


@pytest.mark.fast_cases("False")
@pytest.mark.filterwarnings("ignore:One-hot")
@pytest.mark.parametrize("with_baseline", [False, True])
def test_the_gate_wraps_substitutes_too(run, files, tmp_path, monkeypatch, with_baseline):
    """Those of a baseline as well, whose attacks are built once more."""
    flags = [*flags_of(files), f"--attacks=transfer:{files / 'mine.keras'}"]
    more = []
    if with_baseline:
        before = [*flags, "--nochecks", f"--output_dir={tmp_path / 'evaluation'}"]
        assert run("evaluate", *before)[0] == 0
        more = [f"--baseline={tmp_path / 'evaluation'}", "--max_loss=0.9"]
    code, out, err = run(
        "gate", *flags, *more, "--min_worst_case=0.01", f"--output_dir={tmp_path / 'gate'}"
    )
    assert code == 0, err
    assert f"transfer:{files / 'mine.keras'}: {DONE}" in out


@pytest.mark.filterwarnings("ignore:One-hot")
def test_export_takes_it_and_knows_its_evaluation(run, files, evaluated, tmp_path):
    flags = flags_of(files, f"--output_dir={tmp_path / 'served'}", f"--evaluation={evaluated}")
    code, out, err = run("export", *[each for each in flags if "epsilon" not in each])
    assert code == 0, err
    assert f"Model: {DONE}" in out
    card = json.loads((tmp_path / "served/1/assets.extra/model_card.json").read_text())
    assert (card["model"]["conversion"], card["evaluation"]["status"]) == (DONE, "measured")
    served = he.load_classifier(tmp_path / "served")
    images, _ = examples()
    shares = keras.ops.softmax(served(images.astype("float32") / 255.0))
    expected = ordinary().predict(images.astype("float32"), verbose=0)
    np.testing.assert_allclose(shares, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("program", "arguments", "parts"),
    [
        ("export", ["--model={files}/mine.keras"], ["pixels (--pixels)", "(--data)"]),
        (
            "evaluate",
            ["--model={files}/mine.keras", "--data={files}/data.npz", "--outputs=logits"],
            ["ends in a softmax", "--outputs"],
        ),
        (
            "evaluate",
            [
                "--model={files}/mine.keras",
                "--data={files}/data.npz",
                "--bounds=0,255",
                "--epsilon=8",
                "--pixels=0..255",
            ],
            ["--pixels=0..255 with --bounds"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:One-hot")
def test_what_is_unknown_or_contradictory_is_one_line(
    run, files, tmp_path, program, arguments, parts
):
    given = [each.format(files=files) for each in arguments]
    assert_one_line_error(run(program, *given, f"--output_dir={tmp_path}"), *parts)


@pytest.mark.filterwarnings("ignore:One-hot")
def test_analyze_takes_it(run, files, tmp_path):
    flags = [f"--run={files / 'mine.keras'}", *flags_of(files, f"--output_dir={tmp_path}")[1:]]
    code, out, err = run("analyze", "gradient-norms", *flags, "--split=test", "--num_examples=16")
    assert code == 0, err
    assert f"mine.keras: {DONE}" in out
