"""Classifiers loaded from run folders, `.keras` files and SavedModels, ours and those of others."""

import functools
import shutil
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    PARITY,
    PIXELS,
    THREAT,
    cosine_model,
    functional,
    images,
    labels,
    linear,
    weights,
)

import he_keras as he
from he_keras.attacks import PGD
from he_keras.model_files import SavedClassifier, load_classifier, load_keras_file

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES = tf.TensorSpec([None, 2, 2, 3], tf.float32)


class Linear(tf.Module):
    """A classifier of TensorFlow alone, whose functions are saved under several names."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.weights = tf.Variable(weights() * factor)

    @tf.function(input_signature=[IMAGES])
    def __call__(self, batch):
        return tf.reshape(batch, [-1, PIXELS]) @ self.weights

    @tf.function(input_signature=[IMAGES])
    def mirrored(self, batch):
        return -self(batch)

    @tf.function(input_signature=[IMAGES])
    def two(self, batch):
        return {"scores": self(batch), "mirrored": -self(batch)}


class Trained(tf.Module):
    """Takes a `training` flag, as saved Keras 2 models do; True mirrors the logits."""

    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(weights())

    @tf.function
    def __call__(self, batch, training=False):
        logits = tf.reshape(batch, [-1, PIXELS]) @ self.weights
        return -logits if training else logits


def save_module(folder, module=None, **signatures):
    module = module or Linear()
    chosen = {name: getattr(module, method) for name, method in signatures.items()}
    tf.saved_model.save(module, str(folder), signatures=chosen or None)
    return folder


def save_trained(folder):
    module = Trained()
    module.__call__.get_concrete_function(IMAGES, training=True)
    module.__call__.get_concrete_function(IMAGES, training=False)
    return save_module(folder, module)


def save_keras(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    functional().save(path)
    return path


KINDS = {
    ".keras file": lambda tmp: save_keras(tmp / "any name.keras"),
    "run folder": lambda tmp: save_keras(tmp / "run" / "model.keras").parent,
    "our export": lambda tmp: he.export_saved_model(functional(), tmp / "served").parent,
    "a version of it": lambda tmp: he.export_saved_model(functional(), tmp / "served"),
    "Keras's export": lambda tmp: functional().export(tmp / "out", verbose=False) or tmp / "out",
    "serving_default": lambda tmp: save_module(
        tmp / "module", other="mirrored", serving_default="__call__"
    ),
    "one signature": lambda tmp: save_module(tmp / "module", anything="__call__"),
    "__call__": lambda tmp: save_module(tmp / "module", one="mirrored", two="mirrored"),
    "a training flag": lambda tmp: save_trained(tmp / "module"),
}


@functools.cache
def expected():
    return PGD(THREAT, 3)(linear, images(), labels())


#: The same files, found in another way.
FOUND_OTHERWISE = ("run folder", "a version of it", "one signature", "a training flag")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in FOUND_OTHERWISE)) for each in KINDS],
)
def test_every_kind_is_attacked_as_the_model_itself(tmp_path, kind):
    model = load_classifier(KINDS[kind](tmp_path))
    batch = tf.constant(images())
    loaded = model(batch, training=False) if isinstance(model, keras.Model) else model(batch)
    np.testing.assert_allclose(loaded, linear(batch), atol=1e-5)
    # White-box: the gradient goes through what was loaded.
    result = PGD(THREAT, 3, batch_size=8)(model, images(), labels())
    np.testing.assert_allclose(result.x_adv, expected().x_adv, atol=1e-6)
    np.testing.assert_array_equal(result.success, expected().success)
    assert 0 < expected().success.mean() < 1


def test_paths_as_text_and_models_of_he_keras(tmp_path):
    model = cosine_model()
    model.compile(keras.optimizers.SGD(0.1))
    model.save(tmp_path / "model.keras")
    loaded = load_classifier(str(tmp_path))
    assert isinstance(loaded, he.HEAdversarialModel) and loaded.head.margin == 0.2
    assert not loaded.compiled and load_keras_file(tmp_path / "model.keras").compiled
    expected_logits = model(images(), training=False)
    np.testing.assert_allclose(loaded(images(), training=False), expected_logits, atol=1e-6)
    served = load_classifier(str(he.export_saved_model(model, tmp_path / "served")))
    assert isinstance(served, SavedClassifier)
    assert (served.signature, served.output) == ("serving_default", "logits")
    np.testing.assert_allclose(served(images()), expected_logits, atol=1e-5)
    # Logits, scale included: not the probabilities beside them.
    assert np.abs(expected_logits).max() > 1


def test_a_run_folder_comes_before_what_lies_beside_the_model(tmp_path):
    save_module(tmp_path / "1", Linear(-1.0))
    save_keras(tmp_path / "model.keras")
    assert isinstance(load_classifier(tmp_path), keras.Model)


def test_the_newest_version_counts(tmp_path):
    for version in (2, 10, 9):
        save_module(tmp_path / str(version), Linear(float(version)))
    (tmp_path / "11").mkdir()
    logits = load_classifier(tmp_path)(tf.constant(images()))
    np.testing.assert_allclose(logits, 10 * linear(images()), rtol=1e-4, atol=1e-4)


def test_signature_and_output_can_be_chosen(tmp_path):
    path = save_module(tmp_path, one="two", serving_default="mirrored")
    batch = tf.constant(images())
    truth = linear(batch)
    np.testing.assert_allclose(load_classifier(path)(batch), -truth, atol=1e-5)
    for signature, output, sign in (
        ("__call__", None, 1),
        ("one", "scores", 1),
        ("one", "mirrored", -1),
        ("serving_default", "output_0", -1),
    ):
        model = load_classifier(path, signature=signature, output=output)
        np.testing.assert_allclose(model(batch), sign * truth, atol=1e-5)


def test_batch_norm_runs_in_inference_mode(tmp_path):
    layers = [keras.Input((2, 2, 3)), keras.layers.BatchNormalization(), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
    model.layers[0].set_weights([np.full(3, each, "float32") for each in (2.0, 0.5, 0.3, 4.0)])
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    logits = model(images(), training=False)
    assert np.abs(logits - model(images(), training=True)).max() > 0.1
    exported = load_classifier(tmp_path / "exported")
    before = exported(tf.constant(images())).numpy()
    np.testing.assert_allclose(exported(tf.constant(images())), logits, atol=1e-5)
    PGD(THREAT, 2)(exported, images(), labels())
    np.testing.assert_array_equal(exported(tf.constant(images())), before)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_images_of_another_precision(tmp_path, dtype):
    model = load_classifier(save_module(tmp_path))
    result = PGD(THREAT, 3, **PARITY)(model, images().astype(dtype), labels())
    in_float32 = PGD(THREAT, 3, **PARITY)(linear, images().astype(dtype), labels())
    np.testing.assert_allclose(result.x_adv, in_float32.x_adv, atol=1e-6)


class Rounding(tf.Module):
    """Rounds pixels to 8 bits; `straight_through` passes the gradient on, `blocked` does not."""

    def __init__(self):
        super().__init__()
        self.linear = Linear()

    @tf.function(input_signature=[IMAGES])
    def straight_through(self, batch):
        @tf.custom_gradient
        def rounded(pixels):
            return tf.round(pixels * 255) / 255, lambda upstream: upstream

        return self.linear(rounded(batch))

    @tf.function(input_signature=[IMAGES])
    def blocked(self, batch):
        return self.linear(tf.cast(tf.cast(batch * 255, tf.uint8), tf.float32) / 255)


def test_gradients_written_by_hand_survive(tmp_path):
    path = save_module(tmp_path, Rounding(), good="straight_through", bad="blocked")
    result = PGD(THREAT, 3)(load_classifier(path, "good"), images(), labels())
    assert result.success.sum() > (linear(images()).numpy().argmax(1) != labels()).sum()
    with pytest.raises(ValueError, match="needs gradients; expected .*; received"):
        PGD(THREAT, 3)(load_classifier(path, "bad"), images(), linear(images()).numpy().argmax(1))


def test_probabilities_alone_are_refused_by_the_attack(tmp_path):
    inputs = keras.Input((2, 2, 3))
    model = keras.Model(inputs, keras.layers.Softmax()(functional()(inputs)))
    model.export(tmp_path, verbose=False)
    with pytest.raises(ValueError, match="returns probabilities; expected logits"):
        PGD(THREAT, 3)(load_classifier(tmp_path), images(), labels())


# Errors


class Odd(tf.Module):
    """Functions that are no classifiers of images."""

    def __init__(self):
        super().__init__()
        self.linear = Linear()

    @tf.function(input_signature=[tf.TensorSpec([None, 2, 2, 3], tf.uint8)])
    def bytes(self, batch):
        return self.linear(tf.cast(batch, tf.float32))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def records(self, batch):
        return tf.zeros([tf.size(batch), CLASSES])

    @tf.function(input_signature=[tf.TensorSpec([8, 2, 2, 3], tf.float32)])
    def eight(self, batch):
        return self.linear(batch)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def numbers(self, batch):
        return tf.zeros([tf.size(batch), CLASSES])

    @tf.function(input_signature=[IMAGES, IMAGES])
    def pairs(self, first, second):
        return self.linear(first - second)

    @tf.function(input_signature=[IMAGES])
    def class_numbers(self, batch):
        return tf.argmax(self.linear(batch), axis=1)

    @tf.function(input_signature=[IMAGES])
    def feature_map(self, batch):
        return batch * 2.0

    @tf.function(input_signature=[IMAGES])
    def heads(self, batch):
        return {"coarse": self.linear(batch), "fine": -self.linear(batch)}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    names = ["bytes", "records", "eight", "numbers", "pairs", "class_numbers", "feature_map"]
    folder = tmp_path_factory.mktemp("odd")
    return save_module(folder, Odd(), heads="heads", **{name: name for name in names})


@pytest.mark.parametrize(
    ("signature", "output", "parts"),
    [
        (None, None, ["which of its functions", "'bytes'", "'heads'", "signature=None"]),
        ("head", None, ["which of its functions", "'heads'", "signature='head'"]),
        ("__call__", None, ["which of its functions", "signature='__call__'"]),
        ("heads", None, ["which of its outputs", "['coarse', 'fine']", "output=None"]),
        ("heads", "logit", ["which of its outputs", "['coarse', 'fine']", "output='logit'"]),
        ("bytes", None, ["does not take floating-point images", "uint8 (None, 2, 2, 3)"]),
        ("records", None, ["does not take floating-point images", "string (None,)"]),
        ("eight", None, ["batches of any size", "float32 (8, 2, 2, 3)"]),
        ("numbers", None, ["batches of any size", "float32 (None,)"]),
        ("pairs", None, ["images alone", "['first', 'second']"]),
        ("class_numbers", None, ["does not return logits", "int64"]),
        ("feature_map", None, ["does not return logits", "(None, 2, 2, 3)"]),
    ],
)
def test_functions_that_cannot_be_attacked_are_named(odd, signature, output, parts):
    with pytest.raises(ValueError, match="; expected .*; received") as error:
        load_classifier(odd, signature=signature, output=output)
    for part in [*parts, str(odd)]:
        assert part in str(error.value)


def damaged_keras(tmp, change):
    """A `.keras` file in which one member is changed."""
    path = save_keras(tmp / "whole.keras")
    damaged = tmp / "damaged.keras"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                target.writestr(name, content)
    return damaged


def cut_short(tmp):
    path = save_keras(tmp / "model.keras")
    path.write_bytes(path.read_bytes()[:-500])
    return path


def text_file(tmp, name, text="rubbish"):
    (tmp / name).parent.mkdir(exist_ok=True)
    (tmp / name).write_text(text)
    return tmp / name


def without_variables(tmp):
    shutil.rmtree(save_module(tmp / "module") / "variables")
    return tmp / "module"


def with_python_code(tmp):
    layers = [keras.Input((2, 2, 3)), keras.layers.Lambda(lambda batch: linear(batch))]
    keras.Sequential(layers).save(tmp / "code.keras")
    return tmp / "code.keras"


def unknown_class(name, content):
    return content.replace(b'"Dense"', b'"Hidden"') if name == "config.json" else content


UNREADABLE = {
    "missing": (lambda tmp: tmp / "none", "No model; expected an existing .keras file, run folder"),
    "missing file": (lambda tmp: tmp / "none.keras", "No model; expected an existing .keras file"),
    "another file": (lambda tmp: text_file(tmp, "x.csv"), "No model; expected an existing .keras"),
    "empty folder": (lambda tmp: tmp, "No model in this folder; expected model.keras"),
    "no zip file": (lambda tmp: text_file(tmp, "x.keras"), "Cannot load the model; expected a .ke"),
    "cut short": (cut_short, "Cannot load the model; expected a .keras file"),
    "no weights": (
        lambda tmp: damaged_keras(tmp, lambda name, old: None if "weights" in name else old),
        "Cannot load the model; expected a .keras file",
    ),
    "weights of text": (
        lambda tmp: damaged_keras(tmp, lambda name, old: b"x" if "weights" in name else old),
        "Cannot load the model; expected a .keras file",
    ),
    "configuration of text": (
        lambda tmp: damaged_keras(tmp, lambda name, old: b"[]" if "config" in name else old),
        "Cannot load the model; expected a .keras file",
    ),
    "unknown class": (
        lambda tmp: damaged_keras(tmp, unknown_class),
        "Cannot load the model; expected a .keras file",
    ),
    "code inside": (with_python_code, "Cannot load the model; expected a .keras file"),
    "damaged run": (
        lambda tmp: text_file(tmp, "run/model.keras").parent,
        "Cannot load the model; expected a .keras file",
    ),
    "damaged SavedModel": (
        lambda tmp: text_file(tmp, "served/saved_model.pb").parent,
        "Cannot load the model; expected a SavedModel",
    ),
    "no variables": (without_variables, "Cannot load the model; expected a SavedModel"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_paths_are_one_clear_error(tmp_path, name):
    make, message = UNREADABLE[name]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=r"; expected .*; received .*") as error:
        load_classifier(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 300 + len(message) + len(str(path)) + 50


def test_images_of_another_shape_are_refused(tmp_path):
    model = load_classifier(save_module(tmp_path))
    with pytest.raises(ValueError, match=r"expected shape \(None, 2, 2, 3\); received .* 4, 4, 3"):
        PGD(THREAT)(model, np.zeros((3, 4, 4, 3), np.float32), [0, 1, 2])


def test_only_saved_models_have_signatures(tmp_path):
    with pytest.raises(ValueError, match="Only SavedModels have a choice of signature; expected"):
        load_classifier(save_keras(tmp_path / "model.keras"), signature="serve")
    with pytest.raises(ValueError, match="a choice of output; expected .*; received output='x'"):
        load_classifier(tmp_path, output="x")
