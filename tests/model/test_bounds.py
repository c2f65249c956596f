"""The same images in other units: every attack and objective answers the same there."""

import keras
import numpy as np
import pytest
import registered_attacks
import tensorflow as tf
from registered_attacks import base_name

import he_keras as he

#: Wide as 0 to 255, and with a zero elsewhere as -1 to 1 has it.
UNITS = (-64.0, 191.0)
SHAPE = (6, 6, 3)
EPSILONS = {"linf": 8 / 255, "l2": 0.25}
#: So that these get anywhere within a small budget.
FASTER = {
    "cw-l2": {"num_steps": 40, "learning_rate": 0.1, "initial_const": 10.0},
    "zoo": {"num_queries": 2000, "learning_rate": 0.3, "sigma": 0.01},
}


def body(is_balanced=False):
    """A smooth classifier of images in [0, 1]; images, and labels that are mostly right.

    Balanced, the images lie in several classes: RayS begins with images that are all white.
    """
    random = np.random.default_rng(0)
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.Conv2D(6, 3, strides=2, activation="softplus"),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )
    for variable in network.trainable_variables:
        variable.assign(random.normal(size=variable.shape, scale=0.4))
    images = random.uniform(size=(12, *SHAPE)).astype("float32")
    images[:3, :3], images[:3, -3:] = 0.0, 1.0
    if is_balanced:
        network.layers[-1].bias.assign_sub(np.asarray(network(images)).mean(axis=0))
    labels = np.asarray(network(images)).argmax(axis=1)
    labels[::6] = (labels[::6] + 1) % 5
    return network, images, labels


def test_images_come_and_go():
    threat = he.ThreatModel("linf", 8, (0, 255))
    images = np.linspace(0, 1, 256, dtype="float32")
    np.testing.assert_allclose(threat.from_unit(images), np.arange(256), atol=2e-5)
    assert threat.from_unit(images).max() == 255.0
    np.testing.assert_allclose(threat.to_unit(threat.from_unit(images)), images, atol=1e-7)
    unit = he.ThreatModel()
    assert unit.from_unit(images) is images and unit.to_unit(images) is images


def test_sizes_that_are_no_multiple_of_epsilon_are_shares_of_the_bounds():
    threat = he.ThreatModel("linf", 8, (0, 255))
    assert he.attacks.get("spsa", threat).step_size == pytest.approx(2.55)
    images = tf.fill([1, 64, 64, 3], 100.0)
    noise = threat.start("gaussian", images, tf.constant([[1, 2]])) - images
    assert float(tf.math.reduce_std(noise)) == pytest.approx(0.255, rel=0.05)


def in_units(network, threat):
    """The same classifier for images in the threat model's units."""
    images = hidden = keras.Input(SHAPE)
    hidden = keras.layers.Rescaling(1 / threat.width, -threat.bounds[0] / threat.width)(hidden)
    for layer in network.layers:
        hidden = layer(hidden)
    return keras.Model(images, hidden)


#: Bridges, and settings of attacks and ensembles that are tried.
ENSEMBLES = ("autoattack-fast-first", "autoattack-plus", "autoattack-rand", "screen")
OTHERS = ("transfer", "cleverhans", "bim", "mim", "nes", *ENSEMBLES)
NAMES = [name for name in he.attacks.names() if base_name(name) not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_attacks_find_the_same_in_any_units(name):
    network, images, labels = body(is_balanced=base_name(name) == "rays")
    norm = "l2" if base_name(name) == "cw-l2" else "linf"
    found = []
    for bounds in ((0.0, 1.0), UNITS):
        threat = he.ThreatModel(norm, EPSILONS[norm] * (bounds[1] - bounds[0]), bounds)
        attack = registered_attacks.build(name, threat, **FASTER.get(base_name(name), {}))
        given = threat.from_unit(images)
        result = attack(in_units(network, threat), given, labels, example_ids=range(len(images)))
        moved = np.abs(result.x_nearest - given).max() / threat.width
        found.append((result.success, threat.to_unit(result.x_nearest), moved))
    (success, x_adv, moved), (other_success, other_x_adv, _) = found
    assert moved > 0.005
    np.testing.assert_array_equal(success, other_success)
    # Rounding decides about the sign of a gradient near zero, here and there.
    different = np.abs(x_adv - other_x_adv) > 1e-3
    assert different.mean() < 0.02


def every_objective():
    fast = ("pgd_at", "llr")
    names = [name for name in he.objectives.names() if name != "standard"]
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", every_objective())
def test_objectives_train_on_the_same_in_any_units(name):
    network, images, labels = body()
    crafted = []
    for bounds in ((0.0, 1.0), UNITS):
        threat = he.ThreatModel("linf", EPSILONS["linf"] * (bounds[1] - bounds[0]), bounds)
        options = {"gamma": 0.005} if name == "awp" else {}
        model = he.HEAdversarialModel(
            in_units(network, threat),
            keras.layers.Dense(5, kernel_initializer=keras.initializers.Orthogonal(seed=0)),
            he.objectives.get(name, threat, **options),
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        model.optimizer.build(model.trainable_variables)
        given = tf.constant(threat.from_unit(images))
        x_adv = model.objective.craft(model, given, tf.constant(labels), (3, 4))
        crafted.append(threat.to_unit(np.asarray(x_adv)))
        if name != "free_at":  # its perturbation is zero before the first step
            assert np.abs(crafted[-1] - images).max() > 0.01
    assert (np.abs(crafted[0] - crafted[1]) > 1e-3).mean() < 0.02


def test_training_on_images_of_0_to_1_under_wide_bounds_is_refused():
    network, images, labels = body()
    threat = he.ThreatModel("linf", 8, (0, 255))
    model = he.HEAdversarialModel(network, keras.layers.Dense(5), he.objectives.PGDAT(threat, 1))
    model.compile(optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    with pytest.raises(ValueError, match="in the units of the bounds"):
        model.fit(images, labels, verbose=0)
    model.fit(threat.from_unit(images), labels, verbose=0)


@pytest.mark.slow
def test_data_sets_are_brought_to_the_bounds_of_the_threat_model():
    images = np.random.RandomState(0).randint(100, 200, (6, 8, 8, 3)).astype("uint8")
    dataset = he.data.ImageDataset("grey", "test", images, np.zeros(6, int), 2)
    threat = he.ThreatModel("linf", 1e-3, (0, 255))

    def looks_like_0_to_255(batch):
        level = tf.reduce_mean(batch, axis=[1, 2, 3])
        return tf.stack([level - 50.0, 50.0 - level], axis=1)

    report = he.evaluate_robustness(looks_like_0_to_255, dataset, threat, ["fgsm"], checks=False)
    assert report.worst_case == 1.0
    assert report.table().startswith("Accuracy; linf, epsilon 0.001, pixels 0 to 255\n")
    corrupted = he.evaluation.evaluate_corruptions(
        looks_like_0_to_255, dataset, ["brightness"], [1], bounds=threat.bounds
    )
    assert corrupted.clean_accuracy == corrupted.accuracy["brightness"][0] == 1.0
    assert "pixels 0 to 255" in corrupted.table()
