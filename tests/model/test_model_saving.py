"""A saved `HEAdversarialModel` comes back whole and trains on as if it had never been saved."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import he_keras as he
from he_keras import objectives

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
OBJECTIVES = {
    "pgd_at": lambda: objectives.PGDAT(THREAT, num_steps=2),
    "trades": lambda: objectives.TRADES(THREAT, num_steps=2, beta=3.0),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=2),
    "fast_at": lambda: objectives.FastAT(THREAT, initialization="zero"),
    "mart": lambda: objectives.MART(THREAT, num_steps=2, beta=2.5, random_start=0.05),
    "n_fgsm": lambda: objectives.NFGSM(
        THREAT, noise_ratio=1.5, step_size="1/20", attack_training_mode=True
    ),
}
HEADS = {
    "linear": lambda: keras.layers.Dense(3),
    "he": lambda: he.CosineHead(3, scale=5.0),
    "m-he": lambda: he.CosineHead(3, scale=5.0, margin=0.1, angle="arc"),
}


def examples(count=8):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_network():
    layers = [
        keras.Input(SHAPE),
        keras.layers.Flatten(),
        keras.layers.Dense(6, activation="relu", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
    ]
    return keras.Sequential(layers)


def build_model(
    objective="pgd_at", head="he", run_eagerly=True, evaluation_attack="pgd-2", **options
):
    given = (build_network(), HEADS[head](), OBJECTIVES[objective](), evaluation_attack)
    model = he.HEAdversarialModel(*given, **options)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, metrics=["sparse_top_k_categorical_accuracy"], run_eagerly=run_eagerly)
    return model


def fit(model, epochs=1):
    return model.fit(*examples(), batch_size=5, epochs=epochs, shuffle=False, verbose=0).history


def as_json(model):
    return json.loads(json.dumps(model.get_config()))


def assert_equal_weights(model, other):
    for weight, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.fast_cases("pgd_at-he", "free_at-he", "n_fgsm-linear")
@pytest.mark.parametrize(
    ("objective", "head"),
    [
        ("pgd_at", "he"),
        ("trades", "m-he"),
        ("free_at", "he"),
        ("fast_at", "linear"),
        ("mart", "m-he"),
        ("n_fgsm", "linear"),
    ],
)
def test_training_goes_on_as_if_never_saved(objective, head, tmp_path):
    """Weights, statistics, momentum, the step that seeds depend on, and perturbations come back."""
    model = build_model(objective, head, seed=4)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, he.HEAdversarialModel)
    assert type(loaded.objective) is type(model.objective)
    assert loaded.objective.get_config() == model.objective.get_config()
    assert_equal_weights(loaded, model)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
    noise, restored = model.objective.state_arrays(), loaded.objective.state_arrays()
    assert noise.keys() == restored.keys()
    for name, array in noise.items():
        np.testing.assert_array_equal(restored[name], array)
    assert fit(loaded) == fit(model)
    assert_equal_weights(loaded, model)


def test_settings_come_back(tmp_path):
    attack = he.attacks.PGD(he.ThreatModel("l2", 0.5), 3, loss="dlr", seed=2)
    model = build_model("trades", evaluation_attack=attack, seed=9, name="saved")
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    assert as_json(loaded) == as_json(model)
    assert (loaded.name, loaded.seed, loaded.objective.beta) == ("saved", 9, 3.0)
    assert (loaded.evaluation_attack.loss, loaded.evaluation_attack.seed) == ("dlr", 2)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.jit_compile is False
    images, labels = examples()
    before, after = (
        each.evaluate(images, labels, verbose=0, return_dict=True) for each in (model, loaded)
    )
    assert before == after
    assert "sparse_top_k_categorical_accuracy" in after


def test_a_model_without_evaluation_attack_keeps_none(tmp_path):
    model = build_model(evaluation_attack=None)
    model.save(tmp_path / "model.keras")
    assert he.load_model(tmp_path / "model.keras").evaluation_attack is None


def test_weights_file_holds_the_perturbations(tmp_path):
    model, other = build_model("free_at"), build_model("free_at")
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal_weights(other, model)
    noise = other.objective.state_arrays()["noise_0"]
    np.testing.assert_array_equal(noise, model.objective.state_arrays()["noise_0"])
    assert np.abs(noise).max() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.slow
def test_a_network_that_builds_itself_late_can_be_saved(tmp_path):
    network = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(6)])
    model = he.HEAdversarialModel(network, he.CosineHead(3), OBJECTIVES["free_at"]())
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    assert not model.built
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    fit(model)
    fit(loaded)
    assert_equal_weights(loaded, model)


def test_checkpoints_and_epoch_backups_of_keras_work(tmp_path):
    model = build_model()
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="val_robust_accuracy", mode="max"
    )
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    images, labels = examples()
    model.fit(
        images,
        labels,
        validation_data=(images, labels),
        epochs=2,
        verbose=0,
        callbacks=[checkpoint, backup],
    )
    assert_equal_weights(he.load_model(tmp_path / "best.keras"), model)


def test_a_copy_from_the_configuration_has_its_own_parts():
    model = build_model("free_at")
    copy = he.HEAdversarialModel.from_config(model.get_config())
    assert as_json(copy) == as_json(model)
    assert copy.objective is not model.objective and copy.head is not model.head


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected an existing .keras file; received .*none\.keras"
    ):
        he.load_model(tmp_path / "none.keras")
    (tmp_path / "broken.keras").write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"Cannot load the model; .*broken\.keras"):
        he.load_model(tmp_path / "broken.keras")


SCRIPT = """
import sys
import numpy as np
import he_keras as he

model = he.load_model(sys.argv[1])
data = np.load(sys.argv[2])
model.fit(data["images"], data["labels"], batch_size=5, shuffle=False, verbose=0)
np.savez(sys.argv[3], *model.get_weights())
"""


@pytest.mark.slow
def test_a_fresh_process_needs_only_the_package(tmp_path):
    """The network holds the package's own layers; the reloaded model trains by its objective."""
    network = he.networks.SmallCNN(input_shape=(16, 16, 3))
    model = he.HEAdversarialModel(network, he.CosineHead(3), OBJECTIVES["free_at"]())
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    generator = np.random.default_rng(0)
    images = generator.uniform(size=(7, 16, 16, 3)).astype(np.float32)
    labels = generator.integers(0, 3, 7)
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    model.fit(images, labels, batch_size=5, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    files = [str(tmp_path / name) for name in ("model.keras", "data.npz", "weights.npz")]
    subprocess.run([sys.executable, "-c", SCRIPT, *files], check=True, timeout=300)
    model.fit(images, labels, batch_size=5, shuffle=False, verbose=0)
    with np.load(tmp_path / "weights.npz") as stored:
        for weight, name in zip(model.get_weights(), stored.files, strict=True):
            np.testing.assert_allclose(weight, stored[name], rtol=1e-5, atol=1e-6)
