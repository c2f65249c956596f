"""What attacks see is `head(network(images, training=False))`, values and gradients."""

import keras
import model_zoo
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.attacks import Victim
from he_keras.attacks.framework.agreement import probe
from he_keras.cpu.folded_network import FoldedNetwork
from he_keras.cpu.functions import is_trusted
from he_keras.precision import difference_by_rounding

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
#: Shares of the largest entry by which a gradient may be rounded.
GRADIENT_SHARE = {"float32": 1e-4, "mixed_float16": 0.02, "mixed_bfloat16": 0.15}
THREAT = he.ThreatModel("linf", 0.05)


def some(names, slow):
    return [pytest.param(each, marks=[pytest.mark.slow] * (each in slow)) for each in names]


def with_gradient(function, images):
    with tf.GradientTape() as tape:
        tape.watch(images)
        outputs = function(images)
        total = tf.reduce_sum(outputs * tf.range(1.0, outputs.shape[-1] + 1.0))
    return outputs.numpy(), tape.gradient(total, images).numpy()


def plain(model):
    """Keras's own way, layer by layer."""
    return lambda images: tf.cast(model.head(model.network(images, training=False)), tf.float32)


def attacked_paths(model):
    """Everything that an attack, an evaluation or an export may call."""

    def fixed():
        return Victim(model).for_many_passes()

    def by_features(images):
        victim = fixed()
        return victim.logits_of_features(victim.features(images))

    return {
        "model": lambda images: model(images, training=False),
        "fixed": lambda images: fixed().logits(images),
        "features": by_features,
        "function": lambda images: Victim(lambda batch: model(batch)).logits(images),
    }


def assert_one_function(model, policy, compiled=False):
    images = model_zoo.images()
    expected, gradient = with_gradient(plain(model), images)
    for name, path in attacked_paths(model).items():
        path = tf.function(path) if compiled else path
        found, own = with_gradient(path, images)
        assert np.abs(found - expected).max() <= difference_by_rounding(expected, model), name
        np.testing.assert_array_equal(path(images), path(images), err_msg=name)
        allowed = GRADIENT_SHARE[policy] * np.abs(gradient).max()
        assert np.abs(own - gradient).max() <= allowed, name


@pytest.mark.parametrize("policy", some(POLICIES, ["mixed_float16", "mixed_bfloat16"]))
@pytest.mark.parametrize("name", model_zoo.NETWORKS)
def test_every_path_gives_the_networks_values_and_gradients(name, policy):
    keras.config.set_dtype_policy(policy)
    assert_one_function(model_zoo.model_of(name), policy)


@pytest.mark.fast_cases("subclassed")
@pytest.mark.parametrize("name", ["functional", "deep custom layer", "subclassed"])
def test_compiled_paths_do_too(name):
    assert_one_function(model_zoo.model_of(name), "float32", compiled=True)


CHANGES = {
    "activation": lambda model: setattr(
        model.network.get_layer("conv"), "activation", keras.activations.relu
    ),
    "other activation": lambda model: setattr(
        model.network.get_layer("relu"), "activation", keras.activations.tanh
    ),
    "epsilon": lambda model: setattr(model.network.get_layer("folded"), "epsilon", 3.0),
    "scale": lambda model: setattr(model.head, "scale", 2.0),
    "frozen": lambda model: setattr(model.network.get_layer("folded"), "trainable", False),
    "strides": lambda model: setattr(model.network.get_layer("second"), "strides", (2, 2)),
}


@pytest.mark.parametrize("policy", some(["float32", "mixed_bfloat16"], ["mixed_bfloat16"]))
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_first_call_are_followed(change, policy):
    keras.config.set_dtype_policy(policy)
    model = model_zoo.model_of("functional")
    images = model_zoo.images()
    before = [path(images).numpy() for path in attacked_paths(model).values()]
    CHANGES[change](model)
    assert_one_function(model, policy)
    if change != "frozen":
        assert all(np.abs(each - plain(model)(images)).max() > 0.01 for each in before)


@pytest.mark.fast_cases("scale")
@pytest.mark.parametrize("change", [each for each in CHANGES if each != "frozen"])
def test_a_compiled_attack_follows_changes_of_the_layers(change):
    model, labels = model_zoo.model_of("functional"), np.zeros(6, int)
    images = model_zoo.images().numpy()
    options = {"random_start": False, "stop_when_broken": False, "keep": "last"}
    attack = he.attacks.PGD(THREAT, 2, **options)
    before = attack(model, images, labels)
    CHANGES[change](model)
    after = attack(model, images, labels)
    fresh = he.attacks.PGD(THREAT, 2, **options)(model, images, labels)
    np.testing.assert_array_equal(after.x_adv, fresh.x_adv)
    np.testing.assert_array_equal(after.margin, fresh.margin)
    assert np.abs(after.margin - before.margin).max() > 1e-3


@pytest.mark.slow
def test_a_model_is_never_broken_by_its_own_augmentation():
    """At a radius where nothing moves, a quarter of the predictions used to count as broken."""
    model, images = model_zoo.model_of("deep custom layer"), model_zoo.images(40).numpy()
    right = model.predict(images, verbose=0).argmax(axis=1)
    threat = he.ThreatModel("linf", 1e-6)
    targets = {"target_images": images[:4] / 2, "target_labels": np.arange(4)}
    for name, options in (("pgd-3", {}), ("feature-3", targets), ("fn-pgd-2", {})):
        attack = he.attacks.get(name, threat, **options)
        assert attack(model, images, right).robust_accuracy == 1.0
    report = he.evaluate_robustness(
        lambda batch: model(batch),
        (images, right),
        threat,
        ["fgsm"],
        checks=False,
    )
    assert report.clean_accuracy == report.worst_case == 1.0


def test_half_precision_rounds_folded_kernels_once_on_every_path():
    """`model(images)` used to fold kernels that its own mixed precision had rounded already."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    half = model_zoo.model_of("preact-resnet")
    images = model_zoo.images(64)
    called = half(images, training=False)
    np.testing.assert_allclose(
        called, half.with_fixed_weights().logits(images), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subclassed", "values", "sequential, late", "layer"])
def test_networks_that_do_not_say_their_shapes_train_and_evaluate(name):
    # Some of them augment images, which `fit` refuses to attack.
    objective = he.objectives.Standard(THREAT)
    model = he.HEAdversarialModel(model_zoo.NETWORKS[name](), he.CosineHead(4), objective)
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    images, labels = model_zoo.images(8).numpy(), np.arange(8) % 4
    history = model.fit(images, labels, verbose=0, validation_data=(images, labels)).history
    assert np.isfinite(history["loss"]).all() and "val_robust_accuracy" in history
    probe(model, images)
    assert is_trusted(model)


@pytest.mark.fast_cases("pgd-2")
@pytest.mark.parametrize("name", ["pgd-2", "feature-2", "fn-pgd-2", "cw-linf-2"])
def test_attacks_read_the_weights_once(name, monkeypatch):
    """Once in their loop, whatever its number of steps, and once in the function that scores."""
    model, images = model_zoo.model_of("functional"), model_zoo.images().numpy()
    traced = []
    right = FoldedNetwork.weights

    def counting(self, for_many_passes=True):
        if not tf.executing_eagerly():
            traced.append(for_many_passes)
        return right(self, for_many_passes)

    monkeypatch.setattr(FoldedNetwork, "weights", counting)
    he.attacks.get(name, THREAT)(model, images, np.arange(6) % 4)
    assert traced == [True, True]


class OwnFeatures(he.HEAdversarialModel):
    """Subtracts the mean of the features before the head takes them."""

    def features(self, images, training=False):
        features = super().features(images, training=training)
        return features - tf.reduce_mean(features, axis=1, keepdims=True)


class OwnCall(he.HEAdversarialModel):
    """Averages the logits of an image and of its mirror image."""

    def call(self, inputs, training=None):
        mirrored = super().call(inputs[:, :, ::-1], training=training)
        return 0.5 * (super().call(inputs, training=training) + mirrored)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(OwnFeatures, "functional", marks=pytest.mark.slow),
        (OwnCall, "subclassed"),
        pytest.param(OwnFeatures, "subclassed", marks=pytest.mark.slow),
        pytest.param(OwnCall, "functional", marks=pytest.mark.slow),
    ],
)
def test_a_subclass_with_passes_of_its_own_is_attacked_as_it_predicts(kind, name):
    usual = model_zoo.model_of(name)
    model = kind(usual.network, usual.head, he.objectives.PGDAT(THREAT, num_steps=1))
    images = model_zoo.images()
    predicted = model.predict(images, verbose=0)
    assert np.abs(predicted - usual.predict(images, verbose=0)).max() > 0.01
    for victim in (Victim(model), Victim(model).for_many_passes()):
        np.testing.assert_allclose(victim.logits(images), predicted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.plain_logits(images), predicted, rtol=1e-5, atol=1e-5)
    labels = predicted.argmax(axis=1)
    result = he.attacks.get("pgd-2", THREAT)(model, np.asarray(images), labels)
    broken = model.predict(result.x_adv, verbose=0).argmax(axis=1) != labels
    np.testing.assert_array_equal(result.success, broken)
    assert result.warnings == ()
