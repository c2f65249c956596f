"""An evaluation that is killed, cut into shards or started again gives the same verdicts."""

import json
import time

import evaluation_program as program
import numpy as np
import pytest
import small_limits
from forked_programs import Program, run_script

import he_keras as he
from he_keras.evaluation.run import journal


def evaluate(folder=None, **options):
    settings = {"checks": False, "batch_size": program.BATCH_SIZE, "mode": "survivors", **options}
    attacks = program.attacks()
    return he.evaluate_robustness(
        program.model(), program.examples(), program.THREAT, attacks, folder, **settings
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return evaluate(folder), folder


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        small_limits.set_block_size(patch, program.BLOCK_SIZE)
        yield


def assert_same(report, folder, whole):
    """Every verdict and every recorded number but the seconds."""
    expected, expected_folder = whole
    assert report.worst_case == expected.worst_case
    for name, flags in expected.correct.items():
        np.testing.assert_array_equal(report.correct[name], flags)
    for name in ("per_example.npz", "gallery.npz"):
        with np.load(folder / name) as one, np.load(expected_folder / name) as other:
            assert one.files == other.files
            for column in one.files:
                np.testing.assert_array_equal(one[column], other[column], err_msg=column)
    one, other = (json.loads((each / "report.json").read_text()) for each in (folder, whole[1]))
    assert without_times(one) == without_times(other)


def without_times(content):
    if isinstance(content, dict):
        # The title is the name of the folder.
        times = ("seconds", "created", "command", "title")
        return {key: without_times(value) for key, value in content.items() if key not in times}
    return [without_times(each) for each in content] if isinstance(content, list) else content


def batches(folder):
    return sorted(folder.glob("adversarial/block-*/*.npz"))


def test_the_case_is_worth_it(whole):
    report, folder = whole
    assert 0.1 < report.worst_case < report.clean_accuracy < 1.0
    assert len({path.parent for path in batches(folder)}) == 3
    assert sum(row.num_broken > 0 for row in report.rows) >= 2


def test_finished_batches_are_not_attacked_again(whole, tmp_path, monkeypatch):
    evaluate(tmp_path)
    missing = batches(tmp_path)[::2]
    assert missing
    for path in missing:
        path.unlink()
    attacked = []
    for kind in (type(attack) for attack in program.single_attacks()):
        call = kind.__call__

        def counting(self, *arguments, call=call, **options):
            attacked.append(self.name)
            return call(self, *arguments, **options)

        if "counting" not in repr(call):
            monkeypatch.setattr(kind, "__call__", counting)
    assert_same(evaluate(tmp_path), tmp_path, whole)
    # The gallery's unbroken examples are attacked once more, for their picture.
    assert attacked[-1] == "first"
    assert len(attacked) == len(missing) + 1


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(whole, tmp_path):
    seen = 0
    for _ in range(6):
        process = Program(run_script, "tests/builders/evaluation_program.py", tmp_path)
        # As soon as there is something new.
        while process.poll() is None and len(batches(tmp_path)) <= seen:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        seen = len(batches(tmp_path))
    assert seen > 0
    assert_same(evaluate(tmp_path), tmp_path, whole)


def test_shards_together_are_the_whole(whole, tmp_path):
    parts = [evaluate(tmp_path, shard=(index, 2)) for index in range(2)]
    assert sum(part.num_examples for part in parts) == program.NUM_EXAMPLES
    assert not (tmp_path / "report.json").exists()
    assert_same(evaluate(tmp_path, merge=True), tmp_path, whole)


def test_merging_needs_every_shard(tmp_path):
    evaluate(tmp_path, shard=(1, 2))
    with pytest.raises(ValueError, match="not complete.*received none at clean/block-00000"):
        evaluate(tmp_path, merge=True)
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_what_is_recorded_is_classified_alike_in_a_fresh_process(whole):
    _, folder = whole
    process = Program(run_script, "tests/builders/evaluation_program.py", "--verify", folder)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    broken = int(np.sum(np.load(folder / "per_example.npz")["broken_by"] >= 0))
    assert broken > 0
    assert f"hold: of {broken} adversarial images 0 are classified" in printed


def test_verification_notices_other_images_and_other_models(whole, tmp_path):
    report = evaluate(tmp_path)
    path = next(path for path in batches(tmp_path) if journal.read_batch(path).broken.any())
    with np.load(path) as archive:
        columns = dict(archive)
    columns["x_adv"] = columns["x_adv"] + np.float32(0.5)
    np.savez(path, **columns)
    spoilt = he.evaluation.verify(program.model(), program.examples(), tmp_path)
    assert not spoilt.holds
    assert spoilt.num_outside == len(columns["x_adv"])
    honest = he.evaluation.verify(lambda x: -program.model()(x), program.examples(), whole[1])
    assert honest.num_outside == 0
    assert report.num_examples == program.NUM_EXAMPLES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "individual"}, "received mode: survivors -> individual \\(folder"),
        ({"batch_size": 5}, "received batch_size: 10 -> 5 \\(folder"),
        (
            {"seed": 3},
            "received first seed: 0 -> 3, both second seed: 0 -> 3, both third seed: 0 -> 3, and 1",
        ),
    ],
)
def test_another_evaluations_folder_is_refused(whole, change, message):
    options = dict(change)
    attacks = program.attacks(seed=options.pop("seed", 0))
    settings = {"checks": False, "batch_size": program.BATCH_SIZE, "mode": "survivors", **options}
    with pytest.raises(ValueError, match=message):
        he.evaluate_robustness(
            program.model(), program.examples(), program.THREAT, attacks, whole[1], **settings
        )


def test_other_data_and_other_weights_are_refused(whole):
    images, labels = program.examples()
    other = program.model()
    kernel = other.weights[0].numpy()
    attacks = program.attacks()
    settings = {"checks": False, "batch_size": program.BATCH_SIZE, "mode": "survivors"}
    with pytest.raises(ValueError, match="received data: other images or labels"):
        shifted = np.clip(images + 0.01, 0, 1)
        he.evaluate_robustness(
            other, (shifted, labels), program.THREAT, attacks, whole[1], **settings
        )
    try:
        other.weights[0].assign(kernel * 1.001)
        with pytest.raises(ValueError, match="received weights: others"):
            he.evaluate_robustness(
                other, (images, labels), program.THREAT, attacks, whole[1], **settings
            )
    finally:
        other.weights[0].assign(kernel)


def test_two_processes_in_one_folder(tmp_path):
    with (
        journal.locked(tmp_path, None),
        pytest.raises(ValueError, match="Another process evaluates into this folder"),
    ):
        evaluate(tmp_path)
    with journal.locked(tmp_path, (0, 2)):
        with pytest.raises(ValueError, match="Another process"), journal.locked(tmp_path, (0, 2)):
            pass
        with pytest.raises(ValueError, match="Another process"), journal.locked(tmp_path, None):
            pass
        with journal.locked(tmp_path, (1, 2)):
            pass
    assert not batches(tmp_path)


def test_a_damaged_batch_is_named(whole, tmp_path):
    evaluate(tmp_path, shard=(0, 2))
    path = batches(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="Damaged record.*delete this file"):
        evaluate(tmp_path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(file, _arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("he_keras.files.write_arrays", full)
    with pytest.raises(OSError, match="No space left"):
        evaluate(tmp_path)
    assert not list(tmp_path.glob("adversarial/block-*/*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "Unknown mode"),
        ({"shard": (2, 2)}, "Invalid shard"),
        ({"shard": (0, 2), "merge": True}, "received both"),
        ({"merge": True}, "expected output_dir"),
        ({"shard": (0, 2)}, "expected output_dir"),
    ],
)
def test_wrong_plans(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**options)
