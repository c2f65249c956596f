"""`wrap_classifier`: what an ordinary Keras classifier returns and takes, and what is done then."""

import contextlib

import keras
import numpy as np
import pytest

import he_keras as he
from he_keras.classifiers import WrappedClassifier

L = keras.layers
SHAPE = (6, 6, 3)
CLASSES = 4


def images():
    return (np.random.RandomState(0).randint(0, 256, (80, *SHAPE)) / 255.0).astype("float32")


def answers_of(model, inputs):
    return np.asarray(keras.ops.cast(model(inputs, training=False), "float32"))


def softmax(logits):
    return np.asarray(keras.ops.softmax(keras.ops.convert_to_tensor(logits)))


def body(*first):
    layers = [*first, L.Conv2D(4, 3, activation="relu"), L.Flatten()]
    return [keras.Input(SHAPE), *layers]


def conv():
    return L.Conv2D(3, 3, padding="same")


def nested():
    inner = keras.Sequential([keras.Input(SHAPE), L.Flatten(), L.Dense(CLASSES, "softmax")])
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, inner(L.Conv2D(3, 3, padding="same")(inputs)))


def frozen_inside():
    base = keras.Sequential([keras.Input(SHAPE), L.Conv2D(4, 3), L.GlobalAveragePooling2D()])
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, L.Dense(CLASSES, "softmax")(base(inputs, training=False)))


def by_operation():
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, keras.ops.softmax(L.Dense(CLASSES)(L.Flatten()(inputs))))


def half(end):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([*body(), *end()])
    keras.config.set_dtype_policy("float32")
    return model


class Subclassed(keras.Model):
    """A model that shows its layers when it runs on symbols."""

    def __init__(self):
        super().__init__()
        self.flatten, self.dropout = L.Flatten(), L.Dropout(0.5)
        self.dense = L.Dense(CLASSES, "softmax")

    def call(self, inputs, training=False):
        return self.dense(self.dropout(self.flatten(inputs), training=training))


def subclassed():
    model = Subclassed()
    model(images(), training=False)
    return model


def adapted():
    normalization = L.Normalization()
    normalization.adapt(images())
    return keras.Sequential([*body(normalization), L.Dense(CLASSES, "softmax")])


SOFTMAX = {
    "last Dense": lambda: keras.Sequential([*body(), L.Dense(CLASSES, "softmax")]),
    "a layer": lambda: keras.Sequential([*body(), L.Dense(CLASSES), L.Softmax()]),
    "Activation": lambda: keras.Sequential([*body(), L.Dense(CLASSES), L.Activation("softmax")]),
    "no Dense": lambda: keras.Sequential([*body(), L.BatchNormalization(), L.Softmax()]),
    "nested end": nested,
    "nested body": frozen_inside,
    "an operation": by_operation,
    "subclassed": subclassed,
    "adapted Normalization": adapted,
    "half": lambda: half(lambda: [L.Dense(CLASSES), L.Activation("softmax", dtype="float32")]),
    "half Dense": lambda: half(lambda: [L.Dense(CLASSES, "softmax", dtype="float32")]),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_softmax_is_cut_wherever_it_is(name, tmp_path, capsys):
    model = SOFTMAX[name]()
    wrapped = he.wrap_classifier(model, pixels="0..1", images=images())
    assert capsys.readouterr().out.startswith(f"{model.name}: softmax removed (")
    assert wrapped.conversion == "softmax removed"
    logits = answers_of(wrapped, images())
    np.testing.assert_allclose(softmax(logits), answers_of(model, images()), atol=2e-3)
    assert np.abs(logits.sum(axis=1) - 1.0).max() > 0.1
    wrapped.save(tmp_path / "wrapped.keras")
    loaded = he.load_model(tmp_path / "wrapped.keras")
    np.testing.assert_allclose(answers_of(loaded, images()), logits, atol=1e-5)
    assert (type(loaded), loaded.conversion) == (WrappedClassifier, "softmax removed")
    assert he.wrap_classifier(loaded, images=images()) is loaded


def test_the_wrapped_model_is_a_copy_that_shows_its_features():
    model = SOFTMAX["last Dense"]()
    before = answers_of(model, images())
    wrapped = he.wrap_classifier(model, pixels="0..1", images=images())
    wrapped.set_weights([0 * each for each in wrapped.get_weights()])
    np.testing.assert_array_equal(answers_of(model, images()), before)
    assert he.attacks.Victim(wrapped).features(images()).shape == (80, 64)


@pytest.mark.parametrize("is_layer", [False, True])
def test_one_sigmoid_unit_becomes_two_classes(is_layer):
    end = [L.Dense(1), L.Activation("sigmoid")] if is_layer else [L.Dense(1, "sigmoid")]
    model = keras.Sequential([*body(), *end])
    wrapped = he.wrap_classifier(model, pixels="0..1", images=images(), verbose=False)
    shares = softmax(answers_of(wrapped, images()))
    np.testing.assert_allclose(shares[:, 1:], answers_of(model, images()), atol=1e-4)
    assert shares.shape == (80, 2)
    assert wrapped.conversion == "sigmoid removed; one unit became two classes"


def test_several_sigmoids_are_logits_of_their_classes():
    model = keras.Sequential([*body(), L.Dense(CLASSES, "sigmoid")])
    wrapped = he.wrap_classifier(model, pixels="0..1", images=images(), verbose=False)
    logits = answers_of(wrapped, images())
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), answers_of(model, images()), atol=1e-4)


def test_a_softmax_inside_is_undone_by_a_logarithm(capsys):
    model = keras.Sequential([*body(), L.Dense(CLASSES, "softmax"), L.Reshape((CLASSES,))])
    wrapped = he.wrap_classifier(model, pixels="0..1", images=images())
    assert "softmax undone by a logarithm, as it cannot be removed" in capsys.readouterr().out
    expected = np.log(answers_of(model, images()))
    np.testing.assert_allclose(answers_of(wrapped, images()), expected, atol=1e-4)


def test_logits_of_images_in_0_to_1_pass_unchanged():
    model = keras.Sequential([*body(), L.Dense(CLASSES)])
    assert he.wrap_classifier(model, "logits", "0..1", verbose=False) is model
    assert he.wrap_classifier(model, pixels="0..1", images=images(), verbose=False) is model


@pytest.mark.parametrize(
    ("first", "factor"),
    [
        (lambda: [L.Rescaling(1 / 255)], 255),
        (lambda: [L.Rescaling(1 / 127.5, offset=-1)], 255),
        (lambda: [L.RandomFlip(), L.RandomRotation(0.1), L.Rescaling(1 / 255)], 255),
        (lambda: [L.Normalization(mean=[120.0] * 3, variance=[3600.0] * 3)], 255),
        (lambda: [L.Normalization(mean=[0.5] * 3, variance=[0.06] * 3)], 1),
        (lambda: [L.Rescaling(2.0, offset=-1)], 1),
        (lambda: [keras.Sequential([keras.Input(SHAPE), L.Rescaling(1 / 255)])], 255),
        (lambda: [keras.Sequential([keras.Input(SHAPE), L.Rescaling(1 / 255), conv()])], 255),
        (lambda: [L.Rescaling(0.1), keras.Sequential([L.Rescaling(0.05), conv()])], 255),
    ],
)
def test_the_first_layers_show_the_pixels(first, factor):
    model = keras.Sequential([*body(*first()), L.Dense(CLASSES, "softmax")])
    wrapped = he.wrap_classifier(model, verbose=False)
    expected = answers_of(model, images() * factor)
    np.testing.assert_allclose(softmax(answers_of(wrapped, images())), expected, atol=1e-3)
    assert ("images in 0..1 times 255" in wrapped.conversion) == (factor == 255)


def test_a_frozen_network_shows_no_pixels():
    """What its convolutions make of black and white says nothing about the range."""
    frozen = L.Conv2D(4, 3, kernel_initializer=keras.initializers.Constant(0.001))
    frozen.trainable = False
    layers = [keras.Input(SHAPE), frozen, L.Flatten(), L.Dense(CLASSES, "softmax")]
    with pytest.raises(ValueError, match=r"pixels \(--pixels\)"):
        he.wrap_classifier(keras.Sequential(layers))


def test_images_stay_in_float32_under_a_policy_of_half_precision():
    model = keras.Sequential([keras.Input((1,)), L.Dense(2, "softmax")])
    model.set_weights([np.array([[1000.0, -1000.0]]), np.array([-500.0, 500.0])])
    keras.config.set_dtype_policy("mixed_bfloat16")
    wrapped = he.wrap_classifier(model, pixels="0..1", verbose=False)
    keras.config.set_dtype_policy("float32")
    inputs = np.array([[0.5], [0.5005]], "float32")
    np.testing.assert_allclose(np.diff(answers_of(wrapped, inputs)[:, 0]), [0.5], atol=1e-3)


def test_an_input_of_integers_is_no_longer_rounded():
    layers = [L.Rescaling(1 / 255), L.Flatten(), L.Dense(CLASSES, "softmax")]
    model = keras.Sequential([keras.Input(SHAPE, dtype="uint8"), *layers])
    wrapped = he.wrap_classifier(model, images=images(), verbose=False)
    expected = answers_of(model, np.round(images() * 255))
    np.testing.assert_allclose(softmax(answers_of(wrapped, images())), expected, atol=1e-3)
    assert "images not rounded to integers" in wrapped.conversion
    half_a_level = images() * 0.5 + 0.5 / 255
    assert not np.allclose(answers_of(wrapped, half_a_level), answers_of(wrapped, images() * 0.5))


def linear(scale, end="softmax", share=1.0):
    """A linear model that finds the class of `patterns` in pixels of 0..1 times 1 / scale."""
    dense = L.Dense(CLASSES, end)
    model = keras.Sequential([keras.Input((CLASSES,)), dense])
    dense.set_weights([share * 30.0 * scale * np.eye(CLASSES), np.zeros(CLASSES)])
    return model


def patterns(noise=0.3):
    random = np.random.RandomState(1)
    labels = random.randint(CLASSES, size=200)
    return np.clip(0.5 * np.eye(CLASSES)[labels] + noise * random.rand(200, CLASSES), 0, 1), labels


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        (linear(1.0), "0..1"),
        (linear(1.0, None), "0..1"),
        (linear(1 / 255), "0..255"),
    ],
)
def test_confidence_tells_the_pixels_of_a_model_that_is_right_in_both(model, pixels, capsys):
    wrapped = he.wrap_classifier(model, "auto", "auto", *patterns())
    out = capsys.readouterr().out
    assert "100.0% of 200 clean images right in 0..1, 100.0% in 0..255" in out
    assert ("times 255" in out) == (pixels == "0..255")
    expected = answers_of(model, patterns()[0] * (255 if pixels == "0..255" else 1))
    answers = answers_of(wrapped, patterns()[0])
    answers = answers if wrapped is model else softmax(answers)
    np.testing.assert_allclose(answers, expected, atol=1e-3)


@pytest.mark.parametrize("factor", [1, 255])
def test_accuracy_tells_the_pixels_of_a_model_with_biases(factor):
    """A bias of half a range answers class 0 alone where the pixels are of the other range."""
    dense = L.Dense(2)
    model = keras.Sequential([keras.Input((1,)), dense])
    dense.set_weights([np.array([[-1.0, 1.0]]) / factor, np.array([0.5, -0.5])])
    inputs = np.linspace(0.0, 1.0, 100, dtype="float32")[:, None]
    labels = (inputs[:, 0] > 0.5).astype(int)
    wrapped = he.wrap_classifier(model, images=inputs, labels=labels, verbose=False)
    assert (answers_of(wrapped, inputs).argmax(axis=1) == labels).mean() > 0.98


@pytest.mark.parametrize("kind", ["uint8", "0..255", "one-hot"])
def test_images_and_labels_as_people_have_them(kind):
    inputs, labels = patterns()
    expected = answers_of(he.wrap_classifier(linear(1 / 255), pixels="0..255"), inputs)
    if kind == "one-hot":
        labels = np.eye(CLASSES)[labels]
    elif kind == "uint8":
        inputs = np.round(inputs * 255).astype("uint8")
    else:
        inputs = inputs * 255
    is_said = pytest.warns(UserWarning, match="One-hot")
    with is_said if kind == "one-hot" else contextlib.nullcontext():
        wrapped = he.wrap_classifier(linear(1 / 255), images=inputs, labels=labels)
    np.testing.assert_allclose(answers_of(wrapped, patterns()[0]), expected, rtol=1e-5)


def dense(*end):
    return keras.Sequential([*body(), *end])


REFUSED = {
    "one number": (lambda: dense(L.Dense(1)), {}, ["outputs (--outputs)", "1 column"]),
    "unknown, in 0 to 1": (
        lambda: dense(L.Dense(CLASSES, "sigmoid"), L.Reshape((CLASSES,))),
        {},
        ["may be probabilities or logits", "outputs (--outputs)"],
    ),
    "not undone": (lambda: dense(L.Dense(CLASSES, "sparsemax")), {}, ["cannot be undone"]),
    "logits asked for": (SOFTMAX["a layer"], {"outputs": "logits"}, ["ends in a softmax"]),
    "probabilities asked for": (
        lambda: dense(L.Dense(CLASSES)),
        {"outputs": "probabilities"},
        ["does not return probabilities"],
    ),
    "pixels unknown": (SOFTMAX["a layer"], {"pixels": "auto"}, ["pixels (--pixels)", "neither"]),
    "an unknown word": (SOFTMAX["a layer"], {"pixels": "0..254"}, ["did you mean '0..255'"]),
    "two outputs": (
        lambda: keras.Model((i := keras.Input(SHAPE)), [L.Flatten()(i), L.Flatten()(i)]),
        {},
        ["several outputs"],
    ),
    "no weights": (lambda: Subclassed(), {}, ["has no weights yet"]),
    "images of another size": (
        SOFTMAX["a layer"],
        {"images": np.zeros((4, 5, 5, 3))},
        ["Images do not fit the model", "(4, 5, 5, 3)"],
    ),
    "fewer labels": (
        SOFTMAX["a layer"],
        {"images": images(), "labels": np.arange(3), "pixels": "auto"},
        ["label for each of the 80 images", "received 3 labels"],
    ),
    "normalised images": (SOFTMAX["a layer"], {"images": -np.ones((4, *SHAPE))}, ["[-1.0, -1.0]"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_is_refused_in_one_sentence(name):
    build, options, parts = REFUSED[name]
    with pytest.raises(ValueError) as error:
        he.wrap_classifier(build(), **{"pixels": "0..1", **options})
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)


def test_a_model_that_is_right_in_both_and_half_confident_is_refused():
    with pytest.raises(ValueError, match=r"pixels \(--pixels\) of 0..1 or 0..255; received 100.0%"):
        he.wrap_classifier(linear(1.0, None, share=0.05), "auto", "auto", *patterns())


def test_accuracy_that_contradicts_the_first_layers_is_refused():
    model = keras.Sequential([keras.Input((1,)), L.Rescaling(2.0), L.Dense(2)])
    model.layers[-1].set_weights([np.array([[-1.0, 1.0]]) / 510, np.array([0.5, -0.5])])
    inputs = np.linspace(0.0, 1.0, 100, dtype="float32")[:, None]
    with pytest.raises(ValueError, match="its first layers show 0..1"):
        he.wrap_classifier(model, images=inputs, labels=(inputs[:, 0] > 0.5).astype(int))


def test_a_model_no_better_than_chance_keeps_the_pixels_of_the_package(capsys):
    model = keras.Sequential([*body(), L.Dense(CLASSES)])
    labels = np.random.RandomState(2).randint(CLASSES, size=80)
    assert he.wrap_classifier(model, images=images(), labels=labels) is model
    assert "no better than chance" in capsys.readouterr().out


def test_models_of_the_package_pass_unchanged():
    network = keras.Sequential(body())
    threat = he.ThreatModel("linf", "8/255")
    model = he.HEAdversarialModel(network, he.CosineHead(CLASSES), he.objectives.PGDAT(threat))
    assert he.wrap_classifier(model) is model
    with pytest.raises(ValueError, match="knows its pixels"):
        he.wrap_classifier(model, pixels="0..255")
    with pytest.raises(TypeError, match="expected a keras.Model"):
        he.wrap_classifier(lambda inputs: inputs)


@pytest.mark.slow
def test_the_record_the_report_and_the_card_say_what_was_done(tmp_path):
    model = keras.Sequential([*body(L.Rescaling(1 / 255)), L.Dense(CLASSES, "softmax")])
    wrapped = he.wrap_classifier(model, verbose=False)
    examples = (np.round(images()[:8] * 255).astype("uint8"), np.eye(CLASSES)[np.arange(8) % 4])
    threat = he.ThreatModel("linf", "8/255")
    with pytest.warns(UserWarning) as said:
        report = he.evaluate_robustness(
            wrapped, examples, threat, ["cw-linf-1"], tmp_path, checks=False
        )
    texts = [str(each.message) for each in said]
    assert sorted(each for each in texts if "uint8" in each or "One-hot" in each) == [
        "One-hot labels: the class is the column that holds 1.",
        "uint8 images: divided by 255.",
    ]
    expected = answers_of(model, images()[:8] * 255).argmax(axis=1) == np.arange(8) % 4
    assert report.clean_accuracy == pytest.approx(expected.mean())
    done = "softmax removed; images in 0..1 times 255"
    for name in ("report.json", "report.html", "adversarial/settings.json"):
        assert done in (tmp_path / name).read_text(encoding="utf-8"), name
    folder = he.export_saved_model(wrapped, tmp_path / "served")
    for name in ("model_card.json", "model_card.md"):
        assert done in (folder / "assets.extra" / name).read_text(encoding="utf-8"), name
    served = he.load_classifier(folder)
    np.testing.assert_allclose(served(images()), answers_of(wrapped, images()), atol=1e-4)
    assert served.bounds == (0.0, 1.0)
