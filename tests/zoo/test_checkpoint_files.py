"""Checkpoint files are read without running anything in them; hostile ones are refused."""

import json
import pathlib
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
from public_checkpoints import FOLDER, golden

from he_keras.zoo.checkpoint_files import read_checkpoint
from he_keras.zoo.tensor_files import write_safetensors
from he_keras.zoo.tensors import Storage, StoredTensor, numbers

HOSTILE = sorted((FOLDER / "hostile").iterdir())
GOOD = (
    FOLDER / "madry_cifar_resnet18.pt",
    FOLDER / "at_he_wrn_10_1_legacy_cuda.pt",
    FOLDER / "jax_tiny.npy",
)
FORMATS = ("zip", "legacy", "jax", "safetensors")


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
def test_hostile_file_is_refused_in_one_sentence(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Not a checkpoint that can be read safely") as refusal:
        read_checkpoint(path)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [] and not (tmp_path.parent / "PWNED_TRAVERSAL").exists()


def test_truncated_file_is_refused(tmp_path):
    content = GOOD[0].read_bytes()
    path = tmp_path / "checkpoint.pt"
    for length in (0, 1, 7, 100, 40_000, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="Not a checkpoint that can be read safely"):
            read_checkpoint(path)


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="Cannot read the checkpoint; expected a file"):
        read_checkpoint(tmp_path / "missing.pt")


def test_jax_structure_is_read():
    content = read_checkpoint(FOLDER / "jax_tiny.npy")
    assert set(content) == {"params", "state"}
    assert content["params"]["wide_res_net/~/init_conv"]["w"].shape == (3, 3, 3, 16)


@pytest.fixture(scope="module")
def good_files(tmp_path_factory):
    """One file of each format."""
    path = tmp_path_factory.mktemp("good") / "rb_resnet18.safetensors"
    write_safetensors(path, golden("rb_resnet18").state)
    return dict(zip(FORMATS, (*GOOD, path), strict=True))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_file_never_crashes_nor_takes_much_memory(kind, rounds, good_files, tmp_path):
    """Flips bytes, above all near the ends, where the structure lies, and cuts the file."""
    draw = np.random.RandomState(rounds)
    content = good_files[kind].read_bytes()
    target = tmp_path / "damaged"
    outcomes = set()
    for _ in range(rounds):
        target.write_bytes(damaged(content, draw))
        outcome, peak = outcome_and_peak(target)
        outcomes.add(outcome)
        assert peak < allowed_peak(len(content))
    assert outcomes == {"read", "refused"}


def allowed_peak(num_bytes: int) -> int:
    # Beside three times the file, the objects of the interpreter for an empty one.
    return 3 * num_bytes + 2**19


def outcome_and_peak(path: pathlib.Path) -> tuple[str, int]:
    """Returns what reading a file ends with, and the bytes that it takes at its peak.

    Threads that earlier tests have left behind allocate memory too, and so does the first import of
    a module. What the reader itself takes is the same every time: the smallest of three.
    """
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(3):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            outcome = outcome_of(path)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
            if peaks[-1] < allowed_peak(path.stat().st_size):
                break
    finally:
        tracemalloc.stop()
    return outcome, min(peaks)


def torch_zip(path: pathlib.Path, data: bytes) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


def test_container_that_is_named_very_often_is_read_once(tmp_path):
    inner = [0.5]
    for _ in range(14):
        inner = [inner] * 40
    path = torch_zip(tmp_path / "shared.pt", pickle.dumps({"extra": inner}, protocol=2))
    outcome, peak = outcome_and_peak(path)
    assert outcome == "read" and peak < allowed_peak(path.stat().st_size)


def test_container_that_contains_itself_is_refused(tmp_path):
    inner = [0.5]
    inner.extend([inner] * 40)
    path = torch_zip(tmp_path / "cycle.pt", pickle.dumps({"extra": inner}, protocol=2))
    with pytest.raises(ValueError, match="a container that contains itself"):
        read_checkpoint(path)


@pytest.mark.parametrize("operation", [b"]", b"J1234", b"G12345678", b"N"])
def test_many_objects_in_few_bytes_are_refused(operation, tmp_path):
    data = b"\x80\x02}(" + operation * (300_000 // len(operation)) + b"1."
    outcome, peak = outcome_and_peak(torch_zip(tmp_path / "objects.pt", data))
    assert outcome == "refused" and peak < allowed_peak(len(data))


def test_tensors_of_one_bfloat16_storage_share_its_copy(tmp_path):
    header = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    text = json.dumps({"weight": header}).encode()
    path = tmp_path / "half.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x80\x3f\x20\xc0")
    assert read_checkpoint(path)["weight"].tolist() == [1.0, -2.5]
    stored = [Storage("0", "BFloat16Storage", 2)] * 2
    flat = numbers(stored[0], b"\x80\x3f\x20\xc0")
    views = [StoredTensor(each, 0, (2,), (1,)).read(flat) for each in stored]
    assert np.shares_memory(*views)


def test_member_whose_checksum_is_wrong_is_refused(tmp_path):
    content = bytearray(GOOD[0].read_bytes())
    content[len(content) // 2] ^= 1
    path = tmp_path / "flipped.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a damaged member"):
        read_checkpoint(path)


def damaged(content: bytes, draw: np.random.RandomState) -> bytes:
    changed = bytearray(content)
    if draw.random_sample() < 0.2:
        changed = changed[: draw.randint(1, len(changed))]
    for _ in range(draw.choice([1, 4, 40])):
        near = draw.randint(min(len(changed), 6000))
        place = [near, len(changed) - 1 - near, draw.randint(len(changed))][draw.randint(3)]
        changed[place] = draw.randint(256)
    return bytes(changed)


def outcome_of(path: pathlib.Path) -> str:
    try:
        read_checkpoint(path)
    except ValueError as error:
        assert str(error).startswith("Not a checkpoint that can be read safely")
        return "refused"
    return "read"
