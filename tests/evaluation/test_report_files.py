"""The files of a report: what is refused, and what the pictures of the gallery hold."""

import base64
import io
import json
import pathlib
import re

import numpy as np
import pytest
from PIL import Image
from report_reader import read_page
from report_samples import ATTACKS, draw, write_sample

from he_keras.evaluation.report import write_html
from he_keras.evaluation.report.robustness_report import digests_of


def edit(folder, **changes):
    report = json.loads((folder / "report.json").read_text())
    report |= changes
    report = {name: value for name, value in report.items() if value is not ...}
    (folder / "report.json").write_text(json.dumps(report))


def edit_arrays(folder, name, **changes):
    arrays = dict(np.load(folder / name)) | changes
    kept = {key: value for key, value in arrays.items() if value is not ...}
    np.savez(folder / name, **kept)


def truncate(path):
    path.write_bytes(path.read_bytes()[:1000])


DAMAGES = {
    "no folder": (
        lambda f: [p.unlink() for p in f.iterdir()],
        "expected a report that an",
    ),
    "truncated json": (lambda f: truncate(f / "report.json"), "Cannot read report.json"),
    "a list": (lambda f: (f / "report.json").write_text("[]"), "received .* a list, not an object"),
    "not text": (
        lambda f: (f / "report.json").write_bytes(b"\xff\xfe\xfa"),
        "Cannot read report.json",
    ),
    "newer": (lambda f: edit(f, schema_version=2), "expected schema_version=1.*received.*=2"),
    "no version": (lambda f: edit(f, schema_version=...), "received schema_version=None"),
    "no worst case": (lambda f: edit(f, worst_case=None), "worst_case of type float"),
    "no attacks": (lambda f: edit(f, attacks=...), "attacks of type list"),
    "no arrays": (lambda f: (f / "per_example.npz").unlink(), "expected per_example.npz"),
    "truncated": (lambda f: truncate(f / "per_example.npz"), "arrays in per_example.npz"),
    "no zip": (lambda f: (f / "per_example.npz").write_text("x"), "arrays in per_example.npz"),
    "empty": (lambda f: (f / "per_example.npz").write_bytes(b""), "arrays in per_example.npz"),
    "no column": (lambda f: edit_arrays(f, "per_example.npz", broken_by=...), "without broken_by"),
    "short": (lambda f: edit_arrays(f, "per_example.npz", clean=np.ones(3)), "{'clean': 3}"),
    "scalar": (lambda f: edit_arrays(f, "per_example.npz", clean=np.ones(())), "'clean': None"),
    "other run": (
        lambda f: edit_arrays(f, "per_example.npz", broken_by=np.full(200, -1)),
        "different evaluations; expected worst_case=",
    ),
    "other clean": (lambda f: edit(f, clean_accuracy=0.5), "expected clean_accuracy=0.5"),
    "no gallery": (lambda f: (f / "gallery.npz").unlink(), "expected gallery.npz"),
    "small gallery": (lambda f: np.savez(f / "gallery.npz", **draw(2, (8, 8, 3))), "expected 12"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_incomplete_reports_are_refused(tmp_path, damage):
    act, message = DAMAGES[damage]
    write_sample(tmp_path)
    act(tmp_path)
    with pytest.raises(ValueError, match=message):
        write_html(tmp_path)
    assert not list(tmp_path.glob("*report.html")), "nothing may be left half-written"


@pytest.mark.parametrize("name", ["per_example.npz", "gallery.npz"])
def test_a_file_of_another_evaluation_with_equal_counts_is_refused(tmp_path, name):
    """The report names the digests of the files that it was written with."""
    folder = write_sample(tmp_path)
    edit(folder, files=digests_of(folder))
    write_html(folder)
    column = "margin" if name == "per_example.npz" else "adversarial"
    edit_arrays(folder, name, **{column: np.load(folder / name)[column][::-1]})
    with pytest.raises(ValueError, match=f"expected the {name} that report.json was written with"):
        write_html(folder)


def test_a_gallery_file_is_not_needed_without_examples(tmp_path):
    write_sample(tmp_path, gallery=[])
    assert "gallery" not in [s.get("id") for s in read_page(write_html(tmp_path)).all("section")]


def test_the_page_is_written_beside_the_report_and_again(tmp_path):
    folder = write_sample(tmp_path / "runs" / "a")
    path = write_html(str(folder))
    assert path == folder / "report.html"
    edit(folder, title="Second title")
    assert "Second title" in write_html(folder).read_text()


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    path = write_html(write_sample(tmp_path))
    before = path.read_bytes()

    def write_half(self, text, **options):
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_html(tmp_path)
    assert path.read_bytes() == before


def pictures(page):
    """Pixels and alternative text of every picture."""
    found = []
    for picture in page.one(id="gallery").all("img"):
        png = base64.b64decode(picture.get("src").partition(",")[2])
        found.append((np.asarray(Image.open(io.BytesIO(png))), picture))
    return found


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (8, 8, 1), (20, 12, 3)])
def test_pictures_hold_the_pixels(tmp_path, shape):
    page = read_page(write_html(write_sample(tmp_path, image_shape=shape)))
    stored = np.load(tmp_path / "gallery.npz")
    shown = pictures(page)
    assert len(shown) == 36
    for number in range(12):
        clean, adversarial = stored["clean"][number], stored["adversarial"][number]
        change = adversarial.astype(float) - clean
        largest = np.abs(change).max()
        expected = (clean, adversarial, 0.5 + change / largest / 2)
        for (pixels, picture), wanted in zip(
            shown[3 * number : 3 * number + 3], expected, strict=True
        ):
            pixels = pixels.reshape(shape)
            np.testing.assert_allclose(pixels, 255 * wanted, atol=0.51)
            assert picture.get("class") == "crisp"
        caption = page.one(id="gallery").all("figcaption")[3 * number + 2].text
        assert caption == f"× {0.5 / largest:.3g}"


def test_alternative_texts_say_label_and_prediction(tmp_path):
    page = read_page(write_html(write_sample(tmp_path)))
    report = json.loads((tmp_path / "report.json").read_text())
    names, examples = report["class_names"], report["gallery"]
    texts = [picture.get("alt") for _, picture in pictures(page)]
    for example, (clean, adversarial, change) in zip(
        examples, zip(*[iter(texts)] * 3, strict=True), strict=True
    ):
        position, label = example["position"], names[example["label"]]
        after = names[example["adversarial_prediction"]]
        before = names[example["clean_prediction"]]
        assert clean == f"Clean image {position}: {label} → {before}"
        assert adversarial == f"Adversarial image {position}: {label} → {after}"
        assert change.startswith(f"Perturbation of image {position}, magnified ")
        assert change.endswith(f"times: {label} → {after}")
    assert [item.text for item in page.one(id="gallery").all("h3")] == [
        "Hardest for the model",
        "Easiest for the model",
    ]


def test_bounds_other_than_0_and_1_are_stretched_to_the_full_range(tmp_path):
    threat = {"norm": "linf", "epsilon": 0.1, "bounds": [-1, 3]}
    write_sample(tmp_path, threat=threat)
    clean = np.stack([np.full((4, 4, 3), value, np.float32) for value in (-1, 0, 1, 3)] * 3)
    np.savez(tmp_path / "gallery.npz", clean=clean, adversarial=clean)
    shown = pictures(read_page(write_html(tmp_path)))
    assert [int(pixels[0, 0, 0]) for pixels, _ in shown[:12:3]] == [0, 64, 128, 255]
    # Nothing changed: grey all over, and no factor.
    assert {int(pixels[0, 0, 0]) for pixels, _ in shown[2::3]} == {128}
    assert ", no change: " in shown[2][1].get("alt")


@pytest.mark.slow
def test_large_pictures_are_shrunk_into_the_page(tmp_path):
    example = {"kind": "hardest", "label": 0, "clean_prediction": 0, "adversarial_prediction": 1}
    examples = [
        dict(example, position=k, broken_by="fgsm", distance=0.1, margin=-1) for k in range(24)
    ]
    write_sample(tmp_path, gallery=examples)
    # Noise: nothing compresses worse.
    random = np.random.default_rng(0)
    clean, adversarial = random.random((2, 24, 224, 224, 3), dtype=np.float32)
    np.savez(tmp_path / "gallery.npz", clean=clean, adversarial=adversarial)
    path = write_html(tmp_path)
    assert 500_000 < path.stat().st_size < 3_000_000
    page = read_page(path)
    sides = {pixels.shape for pixels, _ in pictures(page)}
    assert len(sides) == 1
    side = sides.pop()[0]
    assert f"Shown at {side} of 224 pixels" in page.one(id="gallery").text


@pytest.mark.parametrize("shape", [(8, 8, 2), (5,)])
def test_examples_that_are_no_pictures_are_named_so(tmp_path, shape):
    write_sample(tmp_path)
    clean = np.zeros((12, *shape), np.float32)
    np.savez(tmp_path / "gallery.npz", clean=clean, adversarial=clean)
    section = read_page(write_html(tmp_path)).one(id="gallery")
    assert f"their shape is {shape}" in section.text and not section.all("img")


def test_pictures_with_nan_do_not_stop_the_page(tmp_path):
    write_sample(tmp_path)
    stored = dict(np.load(tmp_path / "gallery.npz"))
    stored["adversarial"][0, 0, 0] = np.nan
    np.savez(tmp_path / "gallery.npz", **stored)
    shown = pictures(read_page(write_html(tmp_path)))
    assert shown[1][0][0, 0].tolist() == [0, 0, 0]
    assert shown[2][0][0, 0].tolist() == [128, 128, 128]


def test_the_documentation_names_every_field(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    written = (root / "docs" / "reference" / "report.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", written))
    write_sample(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    entries = [report, report["threat"], report["attacks"][0], report["gallery"][0]]
    entries += [report["checks"][0], report["he_panel"], report["he_panel"]["rows"][0]]
    entries += [report["corruptions"], report["transfer"], report["epsilon_curve"]]
    entries += [report["epsilon_curve"]["points"][0], np.load(tmp_path / "gallery.npz")]
    fields = {name for entry in entries for name in entry}
    arrays = set(np.load(tmp_path / "per_example.npz")) - set(ATTACKS)
    assert (fields | arrays) - documented == set()
