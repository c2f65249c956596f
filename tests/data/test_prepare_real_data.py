"""Real data are prepared whole or not at all, whatever happens meanwhile."""

import hashlib
import pathlib

import prepare_real_data
import pytest

PUBLISHED = b"published pixels"


def fetch(folder, target):
    del folder
    (target / "pixels").write_bytes(PUBLISHED)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Stands for TFDS, and for a data set of one file; returns what was built from."""
    sums = tmp_path / "sums"
    sums.write_text(f"{hashlib.sha256(PUBLISHED).hexdigest()}  mnist/pixels\n")
    monkeypatch.setattr(prepare_real_data, "SUMS", sums)
    monkeypatch.setitem(prepare_real_data.FETCH, "mnist", fetch)
    seen = []

    def build(name, raw, staging):
        seen.append((raw / "pixels").read_bytes())
        folder = staging / name / "3.0.1"
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")

    monkeypatch.setattr(prepare_real_data, "build", build)
    return seen


def run(tmp_path):
    return prepare_real_data.main(["mnist", f"--data_dir={tmp_path / 'data'}"])


def left_behind(tmp_path):
    return sorted(path.name for path in (tmp_path / "data").rglob("*") if path.is_file())


def test_what_is_there_stays_as_it_is(built, tmp_path, capsys):
    assert run(tmp_path) == 0
    assert left_behind(tmp_path) == [".preparing", "dataset_info.json"]
    assert run(tmp_path) == 0
    assert built == [PUBLISHED]
    assert "mnist: already in" in capsys.readouterr().out


def test_other_images_are_refused(built, tmp_path, capsys, monkeypatch):
    def fetch_others(folder, target):
        del folder
        (target / "pixels").write_bytes(b"others")

    monkeypatch.setitem(prepare_real_data.FETCH, "mnist", fetch_others)
    assert run(tmp_path) == 2
    error = capsys.readouterr().err
    assert "not the published data" in error and "received something else in pixels" in error
    assert built == [] and left_behind(tmp_path) == [".preparing"]


def test_a_missing_program_names_the_folder_for_files_by_hand(built, tmp_path, capsys, monkeypatch):
    def fetch_by_program(folder, target):
        del target
        prepare_real_data.call("no-such-program", folder=folder)

    monkeypatch.setitem(prepare_real_data.FETCH, "mnist", fetch_by_program)
    assert run(tmp_path) == 2
    raw = tmp_path / "data" / "raw" / "mnist"
    error = capsys.readouterr().err
    assert "no-such-program is not installed" in error
    assert f"put the published files into {raw}: pixels" in error
    # As the message says; nothing is fetched then.
    raw.mkdir()
    (raw / "pixels").write_bytes(PUBLISHED)
    assert run(tmp_path) == 0
    assert built == [PUBLISHED]


def test_a_killed_run_goes_on_from_its_files(built, tmp_path, monkeypatch):
    working = prepare_real_data.build

    def killed(name, raw, staging):
        staging.mkdir()
        (staging / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_real_data, "build", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert not (tmp_path / "data" / "mnist").exists()
    monkeypatch.setattr(prepare_real_data, "build", working)
    monkeypatch.setitem(prepare_real_data.FETCH, "mnist", None)
    assert run(tmp_path) == 0
    assert left_behind(tmp_path) == [".preparing", "dataset_info.json"]


def test_unknown_names_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare_real_data.main(["imagenet", f"--data_dir={tmp_path}"])
    assert "received ['imagenet']" in capsys.readouterr().err


def test_the_sums_are_of_every_file_of_the_published_archives():
    counts = {name: len(prepare_real_data.expected_sums(name)) for name in prepare_real_data.FETCH}
    assert counts == {"cifar10": 6, "mnist": 4, "fashion_mnist": 4}
    assert pathlib.Path(prepare_real_data.SUMS).is_file()
