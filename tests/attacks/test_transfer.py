"""Transfer attacks: crafted on a substitute from a file, scored on the target."""

import functools
import json

import golden_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    PIXELS,
    THREAT,
    Counting,
    cosine_model,
    functional,
    images,
    labels,
    linear,
    weights,
)

import he_keras as he
from he_keras import attacks
from he_keras.attacks import MIM, PGD
from he_keras.attacks.transfer import Transfer

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

PROTOCOL = {"keep": "last", "stop_when_broken": False}
#: The papers' protocol: also what the target gets wrong from the start.
to_the_end = functools.partial(Transfer, stop_when_broken=False)


@functools.cache
def other_weights():
    noise = np.random.default_rng(5).normal(size=(PIXELS, CLASSES)).astype(np.float32)
    return weights() + noise


def target(batch):
    """Similar to the substitute `linear`, but not the same."""
    return tf.reshape(batch, [-1, PIXELS]) @ other_weights()


def hard(batch):
    """The target without any gradient."""
    logits = tf.numpy_function(lambda array: target(array).numpy(), [batch], tf.float32)
    return tf.ensure_shape(logits, [None, CLASSES])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The substitute: the classifier `linear`, in a file with capital letters and a comma."""
    path = tmp_path_factory.mktemp("Substitute, one") / "Model.keras"
    functional().save(path)
    return path


METHODS = {
    "pgd": (PGD, {}),
    "mim": (MIM, {}),
    "pgd from the image": (PGD, {"random_start": False}),
    "pgd on the margin": (PGD, {"loss": "cw", "step_size": 0.01}),
    "pgd, best iterate": (PGD, {"keep": "best"}),
}


@pytest.mark.parametrize(
    ("norm", "name"), [*(("linf", name) for name in METHODS), ("l2", "pgd"), ("l1", "mim")]
)
def test_the_images_are_those_of_the_attack_on_the_substitute(path, norm, name):
    build, options = METHODS[name]
    threat = he.ThreatModel(norm, 0.05 if norm == "linf" else 0.3)
    attack = to_the_end(threat, path, 6, method=name[:3], seed=3, **options)
    result = attack(target, images(), labels())
    direct = build(threat, 6, seed=3, **{**PROTOCOL, **options})(linear, images(), labels())
    np.testing.assert_allclose(result.x_adv, direct.x_adv, atol=1e-6)
    # The verdict is the target's: on every image, whatever the substitute says of it.
    logits = target(result.x_adv).numpy()
    np.testing.assert_array_equal(result.success, logits.argmax(axis=1) != labels())
    assert np.any(result.success != direct.success)
    own = np.take_along_axis(logits, labels()[:, None], axis=1)[:, 0]
    others = np.where(np.eye(CLASSES, dtype=bool)[labels()], -np.inf, logits).max(axis=1)
    np.testing.assert_allclose(result.margin, own - others, atol=1e-5)


def test_every_image_is_attacked_to_the_end(path):
    """Also those that substitute or target get wrong from the start."""
    result = to_the_end(THREAT, path, 10, random_start=False)(target, images(), labels())
    wrong = linear(images()).numpy().argmax(1) != labels()
    assert wrong.any() and np.any(target(images()).numpy().argmax(1) != labels())
    np.testing.assert_allclose(result.distance, 0.05, atol=1e-6)
    stopping = Transfer(THREAT, path, 10, random_start=False)
    rested = stopping(target, images(), labels())
    left_alone = target(images()).numpy().argmax(1) != labels()
    np.testing.assert_array_equal(rested.x_adv[left_alone], images()[left_alone])
    np.testing.assert_allclose(rested.x_adv[~left_alone], result.x_adv[~left_alone], atol=1e-6)


def test_passes_are_those_through_the_target(path):
    result = to_the_end(THREAT, path)(target, images(), labels())
    np.testing.assert_array_equal(result.forward_passes, 2)
    np.testing.assert_array_equal(result.backward_passes, 0)
    counting = Counting(lambda batch: target(batch))
    to_the_end(THREAT, path)(counting, images(), labels())
    assert counting.calls == 2  # The probe, and the trace of what scores images.


def test_the_target_needs_no_gradient(path):
    attack = to_the_end(THREAT, path)
    result = attack(hard, images(), labels())
    np.testing.assert_array_equal(result.success, attack(target, images(), labels()).success)
    assert result.success.any() and not result.success.all()


def test_seed_and_numbers_of_the_examples_decide_the_start(path):
    whole = to_the_end(THREAT, path)(target, images(), labels())
    batches = to_the_end(THREAT, path, batch_size=3)(target, images(), labels())
    np.testing.assert_allclose(whole.x_adv, batches.x_adv, atol=1e-6)
    part = to_the_end(THREAT, path)(target, images()[5:9], labels()[5:9], np.arange(5, 9))
    np.testing.assert_allclose(whole.x_adv[5:9], part.x_adv, atol=1e-6)
    other = to_the_end(THREAT, path, 1, 0.001, seed=1)(target, images(), labels())
    one = to_the_end(THREAT, path, 1, 0.001)(target, images(), labels())
    assert np.abs(other.x_adv - one.x_adv).max(axis=(1, 2, 3)).min() > 1e-3


def test_the_scale_is_the_substitutes(tmp_path):
    """At another scale the cross-entropy weighs the classes of its gradient otherwise."""
    cosine_model().save(tmp_path / "model.keras")
    options = {"num_steps": 1, "step_size": 0.02, "random_start": False}
    threat = he.ThreatModel("l2", 0.05)
    for scale in ("model", "unit"):
        result = to_the_end(threat, tmp_path, logit_scale=scale, **options)(
            target, images(), labels()
        )
        direct = PGD(threat, logit_scale=scale, **options, **PROTOCOL)
        direct = direct(cosine_model(), images(), labels())
        np.testing.assert_allclose(result.x_adv, direct.x_adv, atol=1e-6)
        if scale == "model":
            at_scale_15 = result
    assert np.abs(result.x_adv - at_scale_15.x_adv).max() > 1e-3


@pytest.mark.parametrize("saved_as", ["run folder", "SavedModel"])
@pytest.mark.parametrize("attack", ["pgd20_2_255", "mim20_2_255"])
def test_stored_images_of_the_linear_model_against_the_he_model(tmp_path, attack, saved_as):
    """The stored images of a reference tool, as far as they are stored, give the same verdicts."""
    substitute = golden_models.classifier("linear")
    if saved_as == "run folder":
        substitute.save(tmp_path / "model.keras")
    else:
        substitute.export(tmp_path, verbose=False)
    transfer = attacks.get(
        f"transfer:{tmp_path}",
        he.ThreatModel("linf", "8/255"),
        method=attack[:3],
        step_size="2/255",
        random_start=False,
        stop_when_broken=False,
    )
    he_model = golden_models.classifier("he")
    result = transfer(he_model, golden_models.images(), golden_models.labels())
    stored = golden_models.outputs("linf", "linear", attack)["x_adv"]
    count = len(stored)
    moved = np.abs(result.x_adv[:count] - stored) > 1e-5
    assert moved.mean() <= golden_models.tolerances("linear", attack)["pix_frac_mean"]
    logits = golden_models.float64_logits("he", stored)
    expected = logits.argmax(axis=1) != golden_models.labels()[:count]
    assert np.sum(result.success[:count] != expected) <= 1
    # Black-box is weaker than white-box, and better than nothing.
    white_box = golden_models.outputs("linf", "he", attack)["success"].mean()
    clean = golden_models.float64_logits("he", golden_models.images()).argmax(axis=1)
    assert (clean != golden_models.labels()).mean() < result.success.mean() < white_box


def test_name_and_configuration(path):
    attack = attacks.get(f"transfer:{path}", THREAT, method="mim", num_steps=4, seed=2)
    assert isinstance(attack, Transfer) and attack.name == f"transfer:{path}"
    assert (attack.path, attack.loss, attack.num_steps) == (str(path), "ce", 4)
    assert attack.step_size == pytest.approx(2.5 * 0.05 / 4)
    data = json.loads(json.dumps(keras.saving.serialize_keras_object(attack)))
    again = keras.saving.deserialize_keras_object(data)
    assert again.get_config() == attack.get_config()
    first, second = (each(target, images(), labels()) for each in (attack, again))
    np.testing.assert_array_equal(first.x_adv, second.x_adv)
    assert to_the_end(THREAT, path).random_start is True
    assert again.random_start is False
    assert "transfer:PATH" in attacks.names()


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "nowhere/model.keras"}, "No model; expected .*; received nowhere/model.keras"),
        ({"path": "tests"}, "No model in this folder; expected model.keras"),
        ({"method": "bim"}, r"expected one of \('pgd', 'mim'\); received method='bim'"),
        ({"num_steps": 0}, "expected an integer >= 1; received num_steps=0"),
        ({"step_size": 0}, "expected a number > 0; received step_size=0"),
        ({"loss": "mse"}, "received loss='mse'"),
        ({"random_start": "far"}, "received random_start='far'"),
        ({"keep": "first"}, "received keep='first'"),
    ],
)
def test_bad_arguments_are_refused_by_the_constructor(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Transfer(**{"threat": THREAT, "path": path, **arguments})


def save_substitute(folder, kind):
    shape = (4, 4, 3) if kind == "other images" else (2, 2, 3)
    inputs = keras.Input(shape)
    hidden = keras.layers.Flatten()(inputs)
    activation = "softmax" if kind == "probabilities" else None
    hidden = keras.layers.Dense(2 if kind == "few classes" else CLASSES, activation)(hidden)
    keras.Model(inputs, hidden).save(folder / "model.keras")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("other images", "incompatible"),
        ("few classes", r"expected 0\.\.1; received 3"),
        ("probabilities", "returns probabilities"),
    ],
)
def test_a_substitute_that_does_not_fit_is_named(tmp_path, kind, reason):
    save_substitute(tmp_path, kind)
    message = f"The substitute does not fit; expected .*; received {tmp_path}: .*{reason}"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        to_the_end(THREAT, tmp_path)(target, images(), labels())
    with pytest.raises(ValueError, match=r"^Label outside the classes; expected 0\.\.1"):
        to_the_end(THREAT, tmp_path)(lambda batch: target(batch)[:, :2], images(), labels())
