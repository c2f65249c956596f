"""`tools/corruption_pictures.py`: the sheets of the documentation."""

import functools

import numpy as np
import PIL.Image
import pytest
from programs import assert_one_line_error, run_here, save_npz

from he_keras.data import corruptions


@pytest.fixture
def run(monkeypatch, capfd):
    return functools.partial(run_here, monkeypatch, capfd, "corruption_pictures")


@pytest.mark.slow
def test_sheets_show_the_corrupted_images(run, tmp_path):
    source = save_npz(tmp_path / "set.npz", (4, 32, 32, 3))
    out = tmp_path / "out"
    code, text, err = run(f"--data={source}", "--examples=2", f"--output_dir={out}")
    assert (code, err) == (0, "")
    names = [
        "32_1.png",
        *(f"224_{g}.jpg" for g in ("noise", "blur", "weather", "digital", "extra")),
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(f"corruptions_{n}" for n in names)
    assert len(text.splitlines()) == 6
    sheet = np.asarray(PIL.Image.open(out / "corruptions_32_1.png").convert("RGB")).astype(int)
    assert sheet.shape == (16 + 19 * 99, 110 + 6 * 99, 3)
    image = np.rint(np.load(source)["x_test"][2] * 255).astype(np.uint8)
    for name, severity in (("contrast", 5), ("brightness", 1)):
        top = 16 + 99 * corruptions.names().index(name)
        left = 110 + 99 * severity
        shown = sheet[top + 1 : top + 96 : 3, left + 1 : left + 96 : 3]
        expected = corruptions.corrupt(image[None], name, severity)[0]
        # 256 colours for the whole sheet.
        assert np.abs(shown - expected).mean() < 25
        assert np.corrcoef(shown.mean(axis=2).ravel(), expected.mean(axis=2).ravel())[0, 1] > 0.7


def test_mistakes_end_in_one_line(run, tmp_path):
    assert_one_line_error(run(f"--data={tmp_path}/none.npz"), "neither a file or folder")
    assert_one_line_error(run(f"--frost_dir={tmp_path}", "--speed"), "No frost pictures")


@pytest.mark.slow
def test_speed_table(run):
    code, text, _ = run("--speed")
    lines = text.strip().splitlines()
    assert code == 0 and len(lines) == 2 + 19 + 1
    assert lines[-1].startswith("| **median** | **")
    assert float(lines[-1].split("**")[3].replace(",", "")) > 0
