"""`HEAdversarialModel.from_classifier`: the network inside a classifier, ready for training."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.layers.input_standardization import InputStandardization

L = keras.layers
SHAPE = (8, 8, 3)
CLASSES = 4
FROM = he.HEAdversarialModel.from_classifier


def images(low=0.0, high=1.0):
    return np.random.RandomState(0).uniform(low, high, (12, *SHAPE)).astype("float32")


def labels():
    return np.arange(12) % CLASSES


def objective(bounds=(0.0, 1.0)):
    epsilon = "8/255" if bounds == (0.0, 1.0) else 8
    return he.objectives.FastAT(he.ThreatModel("linf", epsilon, bounds))


def shares(logits):
    return np.asarray(keras.ops.softmax(keras.ops.cast(logits, "float32")))


def answers(model, inputs):
    return np.asarray(keras.ops.cast(model(inputs, training=False), "float32"))


def end():
    return [L.Conv2D(4, 3, activation="relu"), L.GlobalAveragePooling2D()]


def sequential(*first, last=None):
    return keras.Sequential([keras.Input(SHAPE), *first, *end(), *(last or [dense()])])


def dense():
    return L.Dense(CLASSES, "softmax")


def functional():
    inputs = keras.Input(SHAPE)
    base = keras.Sequential([keras.Input(SHAPE), *end()], name="base")
    base.trainable = False
    return keras.Model(inputs, dense()(base(inputs / 255.0, training=False)))


class Subclassed(keras.Model):
    """Shows its layers when it runs on symbols."""

    def __init__(self):
        super().__init__()
        self.parts, self.dropout, self.last = end(), L.Dropout(0.5), dense()

    def call(self, inputs, training=False):
        features = inputs / 255.0
        for part in self.parts:
            features = part(features)
        return self.last(self.dropout(features, training=training))


class OtherInTraining(Subclassed):
    def call(self, inputs, training=False):
        if training:
            inputs = self.dropout(inputs)
        return super().call(inputs, training)


def built(model):
    model(images(), training=False)
    return model


class Backbone(keras.Model):
    """Functional inside, with arguments of its own, as KerasHub's are."""

    def __init__(self, width=4, **kwargs):
        inputs = keras.Input(SHAPE)
        features = L.Conv2D(width, 3)(L.Rescaling(1 / 255)(inputs))
        super().__init__(inputs, L.GlobalAveragePooling2D()(features), **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def backbone():
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, dense()(Backbone(5)(inputs)))


def applications():
    build = keras.applications.MobileNetV3Small
    network = build(weights=None, input_shape=(32, 32, 3), include_top=False, pooling="avg")
    return keras.Model(network.inputs[0], dense()(network.outputs[0]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: sequential(L.Rescaling(1 / 255)),
        lambda: sequential(L.Rescaling(1 / 127.5, -1), last=[L.Dense(CLASSES), L.Softmax()]),
        lambda: sequential(L.Normalization(mean=[99.0, 120.0, 130.0], variance=[3600.0] * 3)),
        functional,
        lambda: built(Subclassed()),
        backbone,
        pytest.param(applications, marks=pytest.mark.slow),
    ],
    ids=["1/255", "-1 to 1", "deviations", "functional", "subclassed", "backbone", "applications"],
)
def test_a_linear_head_keeps_the_function_on_images_in_0_to_1(build):
    classifier = build()
    model = FROM(classifier, objective(), head="linear")
    sides = model.network.input_shape[1:]
    inputs = np.random.RandomState(0).rand(6, *sides).astype("float32")
    np.testing.assert_allclose(
        shares(answers(model, inputs)), answers(classifier, 255 * inputs), atol=1e-4
    )
    assert model.augmentation is None


def test_the_model_is_a_copy_that_trains_and_saves(tmp_path):
    classifier = functional()
    before = [each.copy() for each in classifier.get_weights()]
    model = FROM(classifier, objective(), scale=5.0, margin=0.1, seed=3)
    assert (model.head.num_classes, model.head.scale, model.head.margin) == (CLASSES, 5.0, 0.1)
    assert (model.head.angle, model.seed) == ("cosine", 3)
    # A frozen base stays frozen.
    assert [each.path for each in model.network.trainable_weights] == []
    model.compile("sgd")
    model.fit(images(), labels(), verbose=0)
    for old, now in zip(before, classifier.get_weights(), strict=True):
        np.testing.assert_array_equal(now, old)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(answers(loaded, images()), answers(model, images()), atol=1e-6)


def test_m_he_and_one_unit():
    model = FROM(sequential(last=[L.Dense(1, "sigmoid")]), head="m-he")
    assert (model.head.angle, model.head.num_classes) == ("arc", 2)
    classifier = sequential(last=[L.Dense(1), L.Activation("sigmoid")])
    model = FROM(classifier, head="linear")
    np.testing.assert_allclose(
        shares(answers(model, images()))[:, 1:], answers(classifier, images()), atol=1e-5
    )


@pytest.mark.parametrize(
    ("first", "bounds", "factor"),
    [
        ([], (0.0, 1.0), 1.0),
        ([], (0.0, 255.0), 1.0),
        ([L.Rescaling(1 / 255)], (0.0, 255.0), 1.0),
        ([L.Rescaling(2.0, -1)], (0.0, 255.0), 1 / 255),
        ([L.Rescaling(2.0, -1)], (0.0, 1.0), 1.0),
    ],
)
def test_the_network_takes_the_pixels_of_the_threat_model(first, bounds, factor):
    classifier = sequential(*first)
    model = FROM(classifier, objective(bounds), head="linear")
    inputs = images(*bounds)
    np.testing.assert_allclose(
        shares(answers(model, inputs)), answers(classifier, inputs * factor), atol=1e-4
    )


def test_pixels_say_what_no_layer_shows():
    classifier = sequential()
    model = FROM(classifier, objective(), head="linear", pixels="0..255")
    expected = answers(classifier, 255 * images())
    np.testing.assert_allclose(shares(answers(model, images())), expected, atol=1e-4)


def test_rescaling_is_exact_under_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    last = [L.Dense(CLASSES), L.Activation("softmax", dtype="float32")]
    classifier = sequential(L.Rescaling(1 / 100), last=last)
    keras.config.set_dtype_policy("float32")
    model = FROM(classifier, objective(), head="linear", pixels="0..255")
    first = model.network.layers[1]
    assert isinstance(first, InputStandardization)
    assert first.std[0] == pytest.approx(100 / 255)
    expected = answers(classifier, 255 * images())
    np.testing.assert_allclose(shares(answers(model, images())), expected, atol=0.02)


def augmented():
    inside = keras.Sequential([L.RandomFlip(), L.RandomTranslation(0.2, 0.2, "constant")])
    return sequential(inside, L.RandomBrightness(0.2), L.Rescaling(1 / 255))


def test_augmentation_is_handed_back_in_the_pixels_of_the_data():
    classifier = augmented()
    with pytest.warns(UserWarning, match=r"taken out of the network \(random_flip\w*, random_tr"):
        model = FROM(classifier, objective(), head="linear")
    expected = answers(classifier, 255 * images())
    np.testing.assert_allclose(shares(answers(model, images())), expected, atol=1e-4)
    unmoved = np.asarray(model.augmentation(images(), training=False))
    np.testing.assert_allclose(unmoved, images(), atol=1e-5)
    moved = np.asarray(model.augmentation(images(), training=True))
    assert 0.0 <= moved.min() and moved.max() <= 1.0
    # Brightness changes by up to a fifth of the range, in whichever pixels the layer counts.
    first, _flip, _translation, *others = model.augmentation.layers
    light = np.asarray(keras.Sequential([first, *others])(images(), training=True))
    assert 0.01 < np.abs(light - images()).max() < 0.21
    model.compile("sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(moved, labels(), verbose=0)
    assert "augmentation" not in [layer.name for layer in model._flatten_layers()]


def unbuilt():
    return Subclassed()


def middle():
    return sequential(L.Conv2D(3, 3, padding="same"), L.RandomFlip())


def after_normalization():
    return sequential(L.Normalization(mean=[0.5] * 3, variance=[0.1, 0.2, 0.3]), L.RandomFlip())


def two_outputs():
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, [L.Flatten()(inputs), L.Flatten()(inputs)])


def cropped():
    layers = [keras.Input(SHAPE), L.RandomCrop(6, 6), L.Flatten(), dense()]
    return keras.Sequential(layers)


@pytest.mark.parametrize(
    ("build", "options", "parts"),
    [
        (unbuilt, {}, ["has no weights yet"]),
        (lambda: built(OtherInTraining()), {}, ["does not show its layers", "(network, head"]),
        (middle, {}, ["augments images in training", "random_flip"]),
        (after_normalization, {}, ["after their channels were normalised", "train.map"]),
        (cropped, {}, ["changes the size of the images"]),
        (two_outputs, {}, ["several outputs"]),
        (lambda: sequential(last=[L.Softmax()]), {}, ["not end in a Dense layer", "softmax"]),
        (sequential, {"head": "linear", "scale": 3.0}, ["no scale and no margin", "scale=3.0"]),
        (sequential, {"head": "hee"}, ["Unknown head", "did you mean 'he'"]),
        (sequential, {"pixels": "255"}, ["Unknown pixels"]),
    ],
)
def test_what_cannot_be_taken_out_is_refused_in_one_sentence(build, options, parts):
    with pytest.raises(ValueError) as error:
        FROM(build(), objective(), **options)
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)


def test_another_object_is_refused():
    with pytest.raises(TypeError, match="expected a trained or built keras.Model"):
        FROM(lambda inputs: inputs, objective())


def before_tracing():
    """A model whose steps must not begin."""
    model = FROM(sequential(), objective())
    model.compile("sgd")

    def step(data):
        raise AssertionError(f"traced with {data}")

    model.train_step = step
    return model


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ((255 * images(), labels()), "Images outside the bounds of the threat model"),
        ((images() * np.nan, labels()), "Images outside the bounds of the threat model, or NaN"),
        (((255 * images()).astype("uint8"), labels()), "expected e.g. images / 255.0"),
        (([images(), images()], labels()), "several inputs"),
        ((images(), labels() + 1), "Label outside the classes; expected 0..3; received labels in"),
        ((images(), labels() - 1), "Label outside the classes"),
        ((images(), labels() + 0.5), "expected whole numbers"),
        ((images(), np.eye(CLASSES)[labels()]), "argmax"),
    ],
)
@pytest.mark.parametrize("place", ["training", "validation"])
def test_what_fit_refuses_is_said_before_tracing(data, part, place):
    given = {"x": images(), "y": labels(), "validation_data": data}
    given = given if place == "validation" else {"x": data[0], "y": data[1]}
    with pytest.raises(ValueError) as error:
        before_tracing().fit(**given, verbose=0)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_data_sets_pass_and_their_steps_tell():
    good = tf.data.Dataset.from_tensor_slices((images(), labels())).batch(6)
    bad = tf.data.Dataset.from_tensor_slices((images(), labels() + 1)).batch(6)
    model = FROM(sequential(), objective(), evaluation_attack=None)
    model.compile("sgd")
    model.fit(good, validation_data=good, shuffle=False, verbose=0)
    for given in ({"x": bad}, {"x": good, "validation_data": bad}):
        with pytest.raises(ValueError, match=r"Label outside the classes; .* in \[1, 4\]$"):
            model.fit(**given, shuffle=False, verbose=0)


def test_a_head_of_one_unit_is_refused():
    with pytest.raises(ValueError, match=r"Dense\(2\) for two classes"):
        he.HEAdversarialModel(keras.Sequential([keras.Input(SHAPE), *end()]), L.Dense(1))
