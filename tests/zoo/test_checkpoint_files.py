"""Checkpoint files are read without running anything in them; hostile ones are refused."""

import pathlib
import tracemalloc

import numpy as np
import pytest
from public_checkpoints import FOLDER

from he_keras.zoo.checkpoint_files import read_checkpoint

HOSTILE = sorted((FOLDER / "hostile").iterdir())
GOOD = (
    FOLDER / "madry_cifar_resnet18.pt",
    FOLDER / "at_he_wrn_10_1_legacy_cuda.pt",
    FOLDER / "jax_tiny.npy",
)


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


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
@pytest.mark.parametrize("rounds", [40, pytest.param(700, marks=pytest.mark.slow)])
def test_damaged_file_never_crashes_nor_takes_much_memory(path, rounds, tmp_path):
    """Flips bytes, above all near the ends, where the structure lies, and cuts the file."""
    draw = np.random.RandomState(rounds)
    content = path.read_bytes()
    target = tmp_path / path.name
    outcomes = set()
    # What is imported at the first reading is not the file's.
    outcome_of(path)
    tracemalloc.start()
    try:
        for _ in range(rounds):
            target.write_bytes(damaged(content, draw))
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            outcomes.add(outcome_of(target))
            _, peak = tracemalloc.get_traced_memory()
            # Beside three times the file, the objects of the interpreter for an empty one.
            assert peak - before < 3 * len(content) + 2**19
    finally:
        tracemalloc.stop()
    assert outcomes == {"read", "refused"}


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
