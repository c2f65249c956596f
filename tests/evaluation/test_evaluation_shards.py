"""Shards that begin together, have nothing to do, and are merged; and the record, verified."""

import json
import re
import shutil
import threading
import tracemalloc
import types

import numpy as np
import pytest
import small_limits
import tensorflow as tf

import he_keras as he
from he_keras.attacks import Attack
from he_keras.evaluation import Check, robustness
from he_keras.evaluation.run import identity

pytestmark = pytest.mark.usefixtures("op_by_op")

THREAT = he.ThreatModel("linf", 0.05)
KERNEL = tf.constant(np.random.RandomState(3).normal(size=(6, 3)).astype("float32"))
CHECK = Check("finite", "after", "pass", "0", "Fine.")


def logits(images):
    return images @ KERNEL


class Linear:
    """The same function of another class."""

    def __call__(self, images):
        return logits(images)


def examples(count=9):
    images = np.random.RandomState(0).uniform(0.1, 0.9, (count, 6)).astype("float32")
    return images, logits(images).numpy().argmax(axis=1)


def evaluate(folder, count=9, **options):
    settings = {"checks": False, "batch_size": 4, **options}
    return he.evaluate_robustness(logits, examples(count), THREAT, ["fgsm"], folder, **settings)


def together(count, work):
    """Calls `work(i)` in so many threads that begin together; returns what each raised, or None."""
    barrier = threading.Barrier(count, timeout=60)
    raised = [None] * count

    def run(number):
        barrier.wait()
        try:
            work(number)
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return evaluate(folder), folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards of nine examples that began together: the last one has nothing to do."""
    folder = tmp_path_factory.mktemp("shards")
    reports = [None] * 4

    def run(number):
        reports[number] = evaluate(folder, shard=(number, 4))

    raised = together(4, run)
    return reports, raised, folder


@pytest.mark.parametrize(
    ("num_examples", "count", "largest"), [(1000, 8, 125), (10_000, 8, 625), (50_000, 4, 1000)]
)
def test_every_shard_gets_its_part(num_examples, count, largest):
    size = robustness.block_size_of(num_examples, 250, 3072, (0, count))
    assert size <= largest
    blocks = -(-num_examples // size)
    assert blocks % count == 0


def test_large_images_make_small_blocks():
    assert robustness.block_size_of(5000, 100, 224 * 224 * 3 * 4, None) == 200
    assert robustness.block_size_of(5000, 250, 224 * 224 * 3 * 4, None) == 250


def test_shards_that_begin_together_share_the_work(shards):
    reports, raised, _ = shards
    assert raised == [None] * 4
    assert [report.num_examples for report in reports] == [3, 3, 3, 0]


def test_an_empty_shard_has_no_accuracy(shards):
    empty = shards[0][3]
    assert np.isnan(empty.worst_case) and np.isnan(empty.rows[0].robust_accuracy)
    assert "nan%" in empty.table()


def test_the_merge_attacks_nothing_and_gives_the_whole(shards, whole, monkeypatch):
    monkeypatch.setattr(Attack, "__call__", lambda *_, **__: pytest.fail("attacked again"))
    folder = shards[2]
    merged, expected = evaluate(folder, merge=True), whole[0]
    assert merged.worst_case == expected.worst_case
    for name, flags in expected.correct.items():
        np.testing.assert_array_equal(merged.correct[name], flags)
    with np.load(folder / "gallery.npz") as one, np.load(whole[1] / "gallery.npz") as other:
        for name in other.files:
            np.testing.assert_allclose(one[name], other[name], atol=1e-6)


def test_processes_with_different_plans_begin_together(tmp_path):
    """One of them says what the folder is for; it is never a mixture."""
    probes = identity.probes_of(examples()[0], THREAT)

    def run(number):
        settings = {"attacks": [{"name": f"pgd-{number}"}], "model": {"class": "function"}}
        identity.claim(tmp_path, settings, {"model": logits}, probes)

    raised = together(4, run)
    (winner,) = json.loads((tmp_path / "settings.json").read_text())["attacks"]
    assert sorted(error is None for error in raised) == [False, False, False, True]
    assert raised.index(None) == int(winner["name"][-1])
    assert all(f"attacks: {winner['name']} -> pgd-" in str(error) for error in raised if error)


def test_a_plan_that_was_begun_is_kept(tmp_path, whole):
    """Begun whole, gone on with in shards: the blocks are those of the beginning."""
    evaluate(tmp_path)
    removed = sorted(tmp_path.glob("adversarial/block-*/*.npz"))[-1]
    removed.unlink()
    for number in range(2):
        evaluate(tmp_path, shard=(number, 2))
    assert removed.exists()
    assert evaluate(tmp_path, merge=True).worst_case == whole[0].worst_case


# Who runs the checks and the panel


@pytest.fixture
def costly(monkeypatch):
    """Counts what would be run."""
    calls = []

    def count(name, answer):
        def run(*_, **__):
            calls.append(name)
            return answer

        return run

    curve = {"attack": "pgd", "epsilons": [0.1], "accuracy": [0.5], "num_examples": 1}
    monkeypatch.setattr(robustness, "preflight", count("before", ()))
    monkeypatch.setattr(robustness, "epsilon_curve", count("curve", curve))
    monkeypatch.setattr(robustness, "sanity_checks", count("after", (CHECK,)))
    monkeypatch.setattr(robustness, "run_panel", count("panel", {"num_examples": 1, "rows": []}))
    with_a_cosine_head = types.SimpleNamespace(head=he.CosineHead(3))
    monkeypatch.setattr(robustness, "Victim", lambda model: with_a_cosine_head)
    return calls


def test_the_first_shard_runs_them_and_the_merge_reads(tmp_path, costly):
    for number in range(2):
        evaluate(tmp_path, shard=(number, 2), checks=None)
    assert costly == ["before", "curve", "after", "panel", "before"]
    merged = evaluate(tmp_path, merge=True, checks=None)
    assert len(costly) == 5
    assert merged.checks == (CHECK,) and merged.he_panel["num_examples"] == 1
    assert merged.epsilon_curve["epsilons"] == [0.1]
    without = evaluate(tmp_path, merge=True, checks=False)
    assert without.checks == () and without.he_panel is None


def test_the_merge_runs_what_no_shard_has_run_only_when_asked(tmp_path, costly):
    for number in range(2):
        evaluate(tmp_path, shard=(number, 2))
    merged = evaluate(tmp_path, merge=True, checks=None)
    assert costly == [] and merged.checks == () and merged.he_panel is None
    merged = evaluate(tmp_path, merge=True, checks=True)
    assert costly == ["before", "curve", "after", "panel"]
    assert merged.checks == (CHECK,)


def test_what_was_checked_is_not_checked_again(tmp_path, costly):
    for _ in range(2):
        evaluate(tmp_path, checks=True)
    assert costly == ["before", "curve", "after", "panel", "before"]


def test_a_shard_says_what_it_will_cost_and_what_is_recorded_costs_nothing(
    tmp_path, costly, capsys
):
    passes = []
    for number in (0, 1, 2, 0):
        evaluate(tmp_path, shard=(number, 3), checks=None, show_progress=True)
        (line,) = re.findall("Passes, .*", capsys.readouterr().out)
        passes.append([int(each.replace(",", "")) for each in re.findall(r"([\d,]+) for", line)])
        assert ("--nochecks" in line) == (len(passes) == 1)
    # Three correct examples each: a gradient, and the scores of the image before and after.
    assert [each[0] for each in passes] == 4 * [3 * attacks_passes()]
    assert [len(each) > 1 for each in passes] == [True, False, False, False]


def attacks_passes():
    return he.attacks.get("fgsm", THREAT).most_passes(3)


# Verification


@pytest.fixture
def recorded(whole, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole[1], folder)
    return folder


def records(folder):
    return sorted(folder.glob("adversarial/block-*/*.npz"))


def verify(folder, data=None, model=logits):
    return he.evaluation.verify(model, data or examples(), folder)


def test_the_worst_case_is_counted_anew(whole, recorded):
    found = verify(recorded)
    assert found.holds and found.worst_case == whole[0].worst_case
    assert found.num_images == whole[0].rows[0].num_broken > 0


def test_a_merged_evaluation_holds(shards):
    assert verify(shards[2]).holds


@pytest.mark.parametrize("kept", [0, -1])
def test_missing_records_do_not_hold(recorded, kept):
    paths = records(recorded)
    for path in paths[:kept] if kept else paths:
        path.unlink()
    found = verify(recorded)
    assert not found.holds and found.num_missing > 0 and found.worst_case is None
    assert "DO NOT HOLD" in found.summary() and "Records are missing" in found.summary()


def test_no_records_of_clean_images_do_not_hold(recorded):
    shutil.rmtree(recorded / "adversarial" / "clean")
    assert not verify(recorded).holds


def test_a_model_whose_answers_were_lost_does_not_hold(recorded):
    (recorded / "adversarial" / "answers.npz").unlink()
    found = verify(recorded)
    assert found.num_missing == 1 and not found.holds


def test_a_report_that_says_more_than_the_records_does_not_hold(recorded):
    path = recorded / "report.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "worst_case": 0.99}))
    found = verify(recorded)
    assert not found.holds
    assert found.deviations == (f"worst case 0.99 there, {found.worst_case} by the records",)


def test_other_data_and_another_model_do_not_hold(recorded):
    images, labels = examples()
    found = verify(recorded, (images * 0.9999, labels))
    assert not found.is_same_data and not found.holds
    # All other verdicts of so weak a model are wrong before and after.
    found = verify(recorded, model=lambda x: -logits(x))
    assert found.num_changed == len(labels) and not found.holds


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda x: 10.0 * logits(x), "logits on probe images: .* apart"),
        (lambda x: tf.stop_gradient(logits(x)), "gradient on probe images: .* apart"),
        (Linear(), "model: function -> Linear"),
    ],
    ids=["scale", "gradient", "class"],
)
def test_another_function_with_the_same_verdicts_does_not_hold(recorded, model, found):
    verified = verify(recorded, model=model)
    assert verified.num_held == verified.num_changed == 0 and verified.deviations == ()
    assert not verified.holds and re.match(found, verified.model_differences[0])
    assert "The model is another one: " in verified.summary()


def test_verdicts_that_were_changed_in_the_report_do_not_hold(recorded):
    """The counts are those of the records, but of other examples."""
    path = recorded / "per_example.npz"
    with np.load(path) as archive:
        columns = dict(archive)
    broken, held = (int(np.flatnonzero(columns["broken_by"] == each)[0]) for each in (0, -1))
    for name in ("broken_by", "fgsm"):
        columns[name][[broken, held]] = columns[name][[held, broken]]
    np.savez(path, **columns)
    assert verify(recorded).deviations == (
        "fgsm of 2 examples in per_example.npz",
        "broken_by of 2 examples in per_example.npz",
    )


def test_a_report_of_another_threat_model_does_not_hold(recorded):
    path = recorded / "report.json"
    content = json.loads(path.read_text())
    content["threat"]["epsilon"] = 0.1
    path.write_text(json.dumps(content))
    assert verify(recorded).deviations == ("epsilon: 0.1 -> 0.05",)


def test_records_of_other_examples_are_not_taken_for_these(recorded):
    first, second, *_ = records(recorded)
    shutil.copy(second, first)
    with pytest.raises(ValueError, match="of other examples"):
        verify(recorded)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_evaluation(tmp_path, monkeypatch):
    """200 images of 48 KiB, of which a block holds 10; the model is known by 64 probes."""
    small_limits.set_block_size(monkeypatch, 10)
    side, count = 64, 200

    def bright(images):
        level = tf.reduce_mean(images, axis=[1, 2, 3])
        return tf.stack([level - 0.5, 0.5 - level], axis=1)

    def generate():
        for number in range(0, count, 10):
            random = np.random.RandomState(number)
            yield random.uniform(0.0, 1.0, (10, side, side, 3)).astype("float32"), np.arange(10) % 2

    spec = tf.TensorSpec([None, side, side, 3], tf.float32), tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    he.evaluate_robustness(bright, data, THREAT, ["fgsm"], tmp_path, 10, checks=False)
    tracemalloc.start()
    try:
        found = he.evaluation.verify(bright, data, tmp_path, batch_size=10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.holds and found.num_images > 50
    one_block = 10 * side * side * 3 * 4
    assert peak < 15 * one_block < count / 10 * one_block
