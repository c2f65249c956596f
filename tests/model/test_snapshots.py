"""Snapshots at the ends of cycles, and the ensemble of their mean probabilities."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_config

import he_keras as he
from he_keras import callbacks
from he_keras.callbacks.snapshots import Snapshots
from he_keras.experiment import prepare_training, run_training
from he_keras.snapshot_ensemble import SnapshotEnsemble

IMAGES = np.random.default_rng(0).uniform(0.2, 0.8, (12, 4)).astype(np.float32)
LABELS = np.arange(12) % 3
THREAT = he.ThreatModel("linf", 0.1)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def linear_members(count=3, scale=2.0):
    generator = np.random.default_rng(5)
    members = []
    for _ in range(count):
        member = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        member.set_weights([generator.normal(0, scale, w.shape) for w in member.get_weights()])
        members.append(member)
    return members


def he_model(seed=0):
    keras.utils.set_random_seed(seed)
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh")])
    model = he.HEAdversarialModel(network, he.CosineHead(3), evaluation_attack=None)
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    return model


# The callback


def test_snapshots_hold_the_weights_of_their_epoch(tmp_path):
    weights = {}
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.update({epoch + 1: model.get_weights()})
    )
    model, snapshots = he_model(), Snapshots(tmp_path, (2, 3, 9))
    model.fit(IMAGES, LABELS, epochs=4, verbose=0, callbacks=[snapshots, note])
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "epoch-0002.keras",
        "epoch-0003.keras",
    ]
    for epoch in (2, 3):
        loaded = he.load_model(snapshots.path(epoch))
        for now, then in zip(loaded.get_weights(), weights[epoch], strict=True):
            np.testing.assert_array_equal(now, then)
    assert not np.array_equal(weights[2][0], weights[3][0])


def test_epochs_must_be_positive_integers(tmp_path):
    with pytest.raises(ValueError, match="expected an integer >= 1; received epochs=0"):
        Snapshots(tmp_path, (0, 3))


def cyclic_config(**train):
    config = tiny_config.get_config()
    with config.unlocked():
        config.optimizer.name, config.optimizer.weight_decay = "adam", 0.0
        config.schedule = {"name": "cycle_jump", "power": 0.1, "drop_points": (0.5,)}
        config.epsilon_schedule = {
            "name": "cycle_cos",
            "initial": 0,
            "final": 0.15,
            "unit": "batch",
        }
        config.train.update({"cycle_ends": (1, 3), "snapshots": True, **train})
    return config.lock()


class Killed(Exception):
    pass


class Kill(keras.callbacks.Callback):
    """Strikes after the first epoch's snapshot, and before anything else is written."""

    def on_epoch_end(self, epoch, logs=None):
        raise Killed


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_snapshots(tmp_path):
    run_training(cyclic_config(), tmp_path / "whole")
    training = prepare_training(cyclic_config(), tmp_path / "killed")
    training.snapshots.append(Kill())
    with pytest.raises(Killed):
        training.run()
    assert [each.name for each in (tmp_path / "killed/snapshots").iterdir()] == ["epoch-0001.keras"]
    run_training(cyclic_config(), tmp_path / "killed")
    for name in ("snapshots/epoch-0001.keras", "snapshots/epoch-0003.keras", "model.keras"):
        whole, resumed = (he.load_model(tmp_path / run / name) for run in ("whole", "killed"))
        for one, other in zip(whole.variables, resumed.variables, strict=True):
            np.testing.assert_array_equal(one, other)
    last, final = (
        he.load_model(tmp_path / "whole" / name).get_weights()
        for name in ("snapshots/epoch-0003.keras", "model.keras")
    )
    assert all(np.array_equal(*each) for each in zip(last, final, strict=True))
    history = (tmp_path / "killed/history.csv").read_text().splitlines()
    assert "epsilon" in history[0] and len(history) == 4


@pytest.mark.slow
def test_snapshots_of_a_run_that_averages_hold_the_average(tmp_path):
    config = cyclic_config()
    with config.unlocked():
        config.train.weight_averaging.update({"kind": "swa", "batch_norm_batches": 0})
    run_training(config, tmp_path)
    average, final = (
        he.load_model(tmp_path / name).get_weights()
        for name in ("snapshots/epoch-0003.keras", "model.keras")
    )
    assert all(np.array_equal(*each) for each in zip(average, final, strict=True))


# The ensemble


def test_output_is_the_logarithm_of_the_mean_probability():
    members = linear_members()
    logits = SnapshotEnsemble(members)(IMAGES).numpy()
    mean = np.mean([softmax(each(IMAGES).numpy().astype(float)) for each in members], axis=0)
    np.testing.assert_allclose(logits, np.log(mean), atol=2e-6)
    np.testing.assert_allclose(softmax(logits), mean, atol=1e-6)
    # The loss that the paper's tool ascends.
    loss = he.losses.cross_entropy(logits, LABELS)
    np.testing.assert_allclose(loss, -np.log(mean[np.arange(12), LABELS]), atol=2e-6)


def test_gradient_is_that_of_the_mean_through_all_members():
    members = linear_members()
    images = tf.constant(IMAGES)
    with tf.GradientTape() as tape:
        tape.watch(images)
        loss = he.losses.cross_entropy(SnapshotEnsemble(members)(images), LABELS)
    gradient = tape.gradient(loss, images).numpy()
    by_member, mean = np.zeros((12, 4)), np.zeros(12)
    for member in members:
        kernel = member.get_weights()[0]
        p = softmax(member(IMAGES).numpy().astype(float))
        true = p[np.arange(12), LABELS]
        by_logits = true[:, None] * (np.eye(3)[LABELS] - p)
        by_member += by_logits @ kernel.T
        mean += true
    np.testing.assert_allclose(gradient, -by_member / mean[:, None], atol=1e-5)


def test_members_far_from_agreement_stay_finite():
    extreme = SnapshotEnsemble(linear_members(scale=3000.0))
    logits = extreme(IMAGES).numpy()
    assert np.isfinite(logits).all() and logits.min() < -500
    np.testing.assert_allclose(np.exp(logits.astype(float)).sum(axis=1), 1.0, atol=1e-5)


def test_one_member_gives_its_own_probabilities():
    (member,) = linear_members(1)
    output = SnapshotEnsemble([member])(IMAGES).numpy()
    np.testing.assert_allclose(output, tf.nn.log_softmax(member(IMAGES)), atol=1e-6)


def test_members_run_in_inference_mode():
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    member = keras.Sequential(layers)
    before = member.get_weights()
    ensemble = SnapshotEnsemble([member])
    np.testing.assert_array_equal(ensemble(IMAGES, training=True), ensemble(IMAGES))
    assert all(np.array_equal(*each) for each in zip(before, member.get_weights(), strict=True))


def test_a_saved_ensemble_is_the_same_classifier(tmp_path):
    members = [he_model(0), he_model(1), *linear_members(1)]
    members[0].fit(IMAGES, LABELS, verbose=0)
    ensemble = SnapshotEnsemble(members)
    expected = ensemble(IMAGES).numpy()
    ensemble.save(tmp_path / "ensemble.keras")
    loaded = he.load_classifier(tmp_path / "ensemble.keras")
    assert type(loaded) is SnapshotEnsemble and len(loaded.members) == 3
    np.testing.assert_array_equal(loaded(IMAGES).numpy(), expected)


@pytest.mark.slow
def test_an_ensemble_is_exported_as_one_model(tmp_path):
    ensemble = SnapshotEnsemble([he_model(0), he_model(1)])
    expected = ensemble(IMAGES)
    he.export_saved_model(ensemble, tmp_path)
    exported = he.load_classifier(tmp_path)
    np.testing.assert_allclose(exported(tf.constant(IMAGES)), expected, atol=1e-5)


def test_files_and_folders_of_snapshots(tmp_path):
    paths = []
    for seed in range(2):
        callbacks.best_checkpoint.save_model(he_model(seed), tmp_path / f"epoch-000{seed}.keras")
    paths = [tmp_path, tmp_path / "epoch-0001.keras"]
    ensemble = SnapshotEnsemble.from_files(paths)
    assert len(ensemble.members) == 3
    expected = SnapshotEnsemble([he_model(0), he_model(1), he_model(1)])
    np.testing.assert_allclose(ensemble(IMAGES), expected(IMAGES), atol=1e-6)
    with pytest.raises(ValueError, match="No model; expected an existing"):
        SnapshotEnsemble.from_files([tmp_path / "missing"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pgd-3", "cw-linf-2", "apgd-ce-5", "apgd-dlr-5", "square-50", "spsa-20", "fab-5"]
)
def test_attacks_take_an_ensemble(name):
    flat = keras.Input((2, 2, 1))
    members = [keras.Model(flat, m(keras.layers.Flatten()(flat))) for m in linear_members()]
    attack = he.attacks.get(name, he.ThreatModel("linf", 0.3))
    ensemble, images = SnapshotEnsemble(members), IMAGES.reshape(-1, 2, 2, 1)
    labels = ensemble(images).numpy().argmax(axis=1)
    result = attack(ensemble, images, labels)
    broken = ensemble(result.x_adv).numpy().argmax(axis=1) != labels
    np.testing.assert_array_equal(result.success, broken)
    assert broken.any()


@pytest.mark.slow
def test_an_ensemble_is_evaluated_like_any_model(tmp_path):
    ensemble = SnapshotEnsemble([he_model(0), he_model(1)])
    report = he.evaluate_robustness(
        ensemble, (IMAGES, LABELS), THREAT, ["pgd-5", "adaptive-pgd-5"], tmp_path
    )
    clean = (ensemble(IMAGES).numpy().argmax(axis=1) == LABELS).mean()
    assert report.to_json()["clean_accuracy"] == pytest.approx(clean)


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ([], TypeError, r"at least one keras.Model; received members=\[\]"),
        ([lambda images: images], TypeError, "Invalid members"),
        (linear_members(1) * 2, ValueError, "received one of them twice"),
    ],
)
def test_wrong_members_are_refused(members, error, message):
    with pytest.raises(error, match=message):
        SnapshotEnsemble(members)


def test_members_must_know_the_same_classes():
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match=r"same number; received \[3, 4\]"):
        SnapshotEnsemble([*linear_members(1), other])(IMAGES)


def test_members_with_a_softmax_are_refused_and_can_be_wrapped():
    members = []
    for member in linear_members():
        members.append(keras.Sequential([*member.layers, keras.layers.Softmax()]))
    ensemble = SnapshotEnsemble(members)
    with pytest.raises(ValueError, match="The model returns probabilities; expected logits"):
        he.attacks.get("fgsm", THREAT)(ensemble, IMAGES, LABELS)
    wrapped = he.wrap_classifier(ensemble, pixels="0..1", verbose=False)
    expected = np.mean([each.predict(IMAGES, verbose=0) for each in members], axis=0)
    np.testing.assert_allclose(softmax(np.asarray(wrapped(IMAGES))), expected, atol=1e-6)
    assert wrapped.conversion == "softmax removed"
    assert he.wrap_classifier(wrapped) is wrapped
