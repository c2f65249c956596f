"""Attacks: errors before any work, in the form what; expected; received."""

import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    THREAT,
    Counting,
    images,
    labels,
    linear,
    weights,
)

import he_keras as he
from he_keras import attacks
from he_keras.attacks import (
    FGSM,
    PGD,
    Attack,
    Crafted,
    ProjectedGradient,
)

BAD_EXAMPLES = {
    "integer images": ((images() * 255).astype(np.uint8), labels(), "dtype=uint8"),
    "images in 0..255": (images() * 255, labels(), "outside the threat model's bounds"),
    "negative images": (images() - 0.5, labels(), "outside the threat model's bounds"),
    "just outside": (np.full((1, 2), 1.00001, np.float32), [0], "outside the threat model's"),
    "NaN": (np.full((1, 2), np.nan, np.float32), [0], "or NaN"),
    "infinity": (np.full((1, 2), np.inf, np.float32), [0], "outside the threat model's bounds"),
    "no example": (images()[:0], labels()[:0], "No examples"),
    "no batch axis": (images()[0, 0, 0], labels()[:3], r"shape=\(3,\)"),
    "labels missing": (images(), labels()[:-1], r"expected integers of shape \(20,\)"),
    "one-hot labels": (images(), np.eye(CLASSES)[labels()], r"shape=\(20, 4\)"),
    "float labels": (images(), labels() / 1.0, "dtype=float64"),
    "boolean labels": (images(), labels() > 0, "dtype=bool"),
    "negative label": (images(), labels() - 5, "Negative label; expected labels >= 0"),
}


@pytest.mark.parametrize("name", BAD_EXAMPLES)
def test_bad_examples_are_refused_before_the_model_runs(name):
    bad_images, bad_labels, message = BAD_EXAMPLES[name]
    model = Counting()
    with pytest.raises(ValueError, match=message) as error:
        PGD(THREAT, 3)(model, bad_images, bad_labels)
    assert model.calls == 0
    assert "; expected" in str(error.value) and "received" in str(error.value)


@pytest.mark.parametrize("ids", [np.arange(19), np.arange(20) / 2, np.arange(20)[:, None]])
def test_bad_example_ids_are_refused_before_the_model_runs(ids):
    model = Counting()
    with pytest.raises(ValueError, match=r"expected integers of shape \(20,\); received"):
        PGD(THREAT, 3)(model, images(), labels(), example_ids=ids)
    assert model.calls == 0


BAD_MODELS = {
    "not callable": (5, TypeError, "expected a keras.Model or a callable"),
    "NumPy": (lambda batch: np.zeros((8, 4)), TypeError, "floating-point TensorFlow tensor"),
    "a dictionary": (lambda batch: {"logits": linear(batch)}, TypeError, "TensorFlow tensor"),
    "class numbers": (lambda batch: tf.argmax(linear(batch), 1), TypeError, "dtype=int64"),
    "a score": (lambda batch: linear(batch)[:, 0], ValueError, "Not a classifier"),
    "a feature map": (lambda batch: batch, ValueError, r"received shape \(8, 2, 2, 3\)"),
    "one row for all": (lambda batch: linear(batch)[:1], ValueError, r"shape \(8, classes\)"),
    "too few classes": (lambda batch: linear(batch)[:, :2], ValueError, r"expected 0\.\.1"),
    "probabilities": (lambda batch: tf.nn.softmax(linear(batch)), ValueError, "the softmax"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_refused_after_one_small_batch(name):
    model, error_type, message = BAD_MODELS[name]
    counting = Counting(model) if callable(model) else model
    with pytest.raises(error_type, match=message) as error:
        PGD(THREAT, 3)(counting, images(), labels())
    assert "; expected" in str(error.value) and "received" in str(error.value)
    assert not callable(model) or counting.calls == 1


def test_scaled_probabilities_are_still_probabilities():
    with pytest.raises(ValueError, match="returns probabilities"):
        PGD(THREAT, 3, logit_scale=20.0)(BAD_MODELS["probabilities"][0], images(), labels())


def test_a_huge_label_is_not_wrapped_around():
    with pytest.raises(ValueError, match=r"expected 0\.\.3"):
        FGSM(THREAT)(linear, images(), labels().astype(np.int64) + 2**32)


def test_a_loss_says_how_many_classes_it_needs():
    with pytest.raises(
        ValueError, match="Too few classes for pgd; expected at least 3; received 2"
    ):
        PGD(THREAT, loss="dlr")(lambda batch: linear(batch)[:, :2], images(), labels() // 2)


def test_a_model_without_gradient_is_not_called_robust():
    """Zeros in place of a missing gradient would leave every image unbroken."""
    rounded = tf.constant(weights())

    def hard(batch):
        return tf.ensure_shape(
            tf.numpy_function(lambda array: array.reshape(-1, 12) @ rounded, [batch], tf.float32),
            [None, CLASSES],
        )

    with pytest.raises(ValueError, match="needs gradients; expected .*; received"):
        PGD(THREAT, 3)(hard, images(), linear(images()).numpy().argmax(axis=1))


BAD_ARGUMENTS = {
    "threat": ({"threat": "linf"}, TypeError, "expected a ThreatModel; received threat='linf'"),
    "no steps": ({"num_steps": 0}, ValueError, "expected an integer >= 1; received num_steps=0"),
    "half a step": ({"num_steps": 2.5}, ValueError, "num_steps=2.5"),
    "true steps": ({"num_steps": True}, ValueError, "num_steps=True"),
    "zero step": ({"step_size": 0}, ValueError, "expected a number > 0; received step_size=0"),
    "backward step": ({"step_size": -0.1}, ValueError, "step_size=-0.1"),
    "step of text": ({"step_size": "big"}, ValueError, "received value='big'"),
    "step of NaN": ({"step_size": np.nan}, ValueError, "received value=nan"),
    "loss": ({"loss": "mse"}, ValueError, r"expected one of \('kl', 'ce', 'cw', 'dlr'\)"),
    "start": ({"random_start": "normal"}, ValueError, "received random_start='normal'"),
    "no start": ({"random_start": None}, ValueError, "received random_start=None"),
    "negative radius": ({"random_start": -0.1}, ValueError, "received random_start=-0.1"),
    "kl": ({"loss": "kl", "random_start": False}, ValueError, "zero gradient at the image itself"),
    "kl, radius 0": ({"loss": "kl", "random_start": 0}, ValueError, "expected a random start"),
    "decay": ({"decay": -1.0}, ValueError, "expected a finite number >= 0.0; received decay=-1.0"),
    "decay of NaN": ({"decay": np.nan}, ValueError, "received decay=nan"),
    "margin": ({"margin": "head"}, ValueError, "received margin='head'"),
    "no margin": ({"margin": None}, ValueError, "received margin=None"),
    "keep": ({"keep": "first"}, ValueError, r"expected one of \('best', 'last'\)"),
    "restarts": ({"num_restarts": 0}, ValueError, "received num_restarts=0"),
    "batch size": ({"batch_size": 0}, ValueError, "received batch_size=0"),
    "seed of text": ({"seed": "a"}, ValueError, r"expected an integer in 0\.\.2\*\*31-1"),
    "negative seed": ({"seed": -1}, ValueError, "received seed=-1"),
    "stopping": ({"stop_when_broken": "no"}, TypeError, "received stop_when_broken='no'"),
    "scale of text": ({"logit_scale": "head"}, ValueError, "received logit_scale='head'"),
    "zero scale": ({"logit_scale": 0.0}, ValueError, "received logit_scale=0.0"),
    "infinite scale": ({"logit_scale": np.inf}, ValueError, "received logit_scale=inf"),
    "true scale": ({"logit_scale": True}, ValueError, "received logit_scale=True"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_the_constructor(name):
    arguments, error_type, message = BAD_ARGUMENTS[name]
    with pytest.raises(error_type, match=message) as error:
        ProjectedGradient(**{"threat": THREAT, **arguments})
    assert "; expected" in str(error.value) and "received" in str(error.value)


@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd-3", "mim-3"])
def test_a_missing_threat_model_is_named(name):
    with pytest.raises(TypeError, match="expected a ThreatModel; received threat=None"):
        attacks.get(name, None)


@pytest.mark.parametrize("name", ["pgdd-20", "fgsm-20", "pgd-", "pgd-x", "", "20", None])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(ValueError, match="Unknown attack; expected one of .*bim-K.*fgsm.*pgd-K"):
        attacks.get(name, THREAT)


def test_names():
    assert attacks.get("PGD-7", THREAT).num_steps == 7
    assert attacks.get("pgd-7", THREAT).name == "pgd-7"
    assert attacks.get("pgd", THREAT).num_steps == 20
    assert attacks.get("pgd-7", THREAT, step_size=0.003, name="mine").name == "mine"
    with pytest.raises(ValueError, match="num_steps is given twice"):
        attacks.get("pgd-7", THREAT, num_steps=20)
    with pytest.raises(ValueError, match="num_steps=0"):
        attacks.get("pgd-0", THREAT)
    with pytest.raises(ValueError, match="registered twice"):
        attacks.register("pgd")(PGD)
    assert set(attacks.names()) >= {"fgsm", "bim-K", "pgd-K", "mim-K", "cw-linf-K"}


def test_an_attack_must_define_run():
    with pytest.raises(TypeError, match="Attack is not an attack; expected"):
        Attack(THREAT)(linear, images(), labels())


class Careless(Attack):
    """Leaves ball and bounds in every pixel."""

    def run(self, victim, images, labels, seeds):
        passes = tf.zeros_like(labels)
        return Crafted(images + 10.0, passes, passes)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_base_class_keeps_the_promises_of_careless_attacks(norm):
    threat = he.ThreatModel(norm, 0.05, bounds=(-0.2, 1.1))
    result = Careless(threat, stop_when_broken=False)(linear, images() * 1.3 - 0.2, labels())
    assert np.isfinite(result.x_adv).all()
    assert result.x_adv.min() >= -0.2 and result.x_adv.max() <= 1.1
    assert 0 <= result.distance.min() and result.distance.max() <= 0.05 + 1e-6
    verdicts = linear(tf.constant(result.x_adv)).numpy().argmax(axis=1) != labels()
    np.testing.assert_array_equal(result.success, verdicts)
    np.testing.assert_array_equal(result.forward_passes, 2)
    if norm == "linf":
        clean = images() * 1.3 - 0.2
        np.testing.assert_allclose(result.x_adv, np.minimum(clean + 0.05, 1.1), atol=1e-6)
