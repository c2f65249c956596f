"""The attacks of cleverhans through our contract, against stored images and our own attacks."""

import functools
import json

import golden_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import CLASSES, PIXELS, THREAT, Counting, images, labels, linear, weights

import he_keras as he
from he_keras import attacks
from he_keras.attacks import ProjectedGradient
from he_keras.attacks.cleverhans_bridge import Cleverhans, CleverhansCWL2, CleverhansFGSM

# The fast tests hold this attack to the promises of every attack and run its example.
pytestmark = pytest.mark.slow

LINF = he.ThreatModel("linf", "8/255")
L2 = he.ThreatModel("l2", 0.5)
# The golden attack, the one of cleverhans, and the same in our words.
SETTINGS = {
    "fgsm": ("fgsm", {}, {"num_steps": 1, "step_size": "8/255"}),
    "bim10": ("bim-10", {"step_size": "2/255"}, {"num_steps": 10, "step_size": "2/255"}),
    "pgd20_0.003": ("pgd-20", {"step_size": 0.003}, {"num_steps": 20, "step_size": 0.003}),
    "mim20_2_255": (
        "mim-20",
        {"step_size": "2/255"},
        {"num_steps": 20, "step_size": "2/255", "decay": 1.0},
    ),
}
both_heads = pytest.mark.parametrize("head", golden_models.HEADS)


@functools.cache
def model(head):
    return golden_models.classifier(head)


@both_heads
@pytest.mark.parametrize("name", SETTINGS)
def test_stored_images_and_our_robust_accuracy(head, name):
    theirs, options, ours = SETTINGS[name]
    attack = attacks.get(f"cleverhans:{theirs}", LINF, stop_when_broken=False, **options)
    result = attack(model(head), golden_models.images(), golden_models.labels())
    stored = golden_models.outputs("linf", head, name)
    allowed = golden_models.tolerances(head, name)
    assert np.sum(result.success != stored["success"]) <= allowed["flags_max_mismatch"]
    logits = golden_models.float64_logits(head, result.x_adv)
    error = np.abs(golden_models.cross_entropy(logits, golden_models.labels()) - stored["ce"])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    difference = np.abs(result.x_adv[: len(stored["x_adv"])] - stored["x_adv"])
    assert (difference > 1e-5).mean() <= allowed["pix_frac_mean"]
    assert np.sum(difference.max(axis=(1, 2, 3)) > 1e-6) <= 1
    # Promised is half a point. A sign at a gradient of rounding size is all that may differ.
    examples = golden_models.autoattack_images(), golden_models.autoattack_labels()
    attack = type(attack).from_config({**attack.get_config(), "stop_when_broken": True})
    options = {"random_start": False, "keep": "last", "stop_when_broken": False}
    accuracy = attack(model(head), *examples).robust_accuracy
    own = ProjectedGradient(LINF, **options, **ours)(model(head), *examples)
    clean = model(head)(examples[0], training=False).numpy().argmax(axis=1) != examples[1]
    assert abs(accuracy - np.mean(~own.success & ~clean)) <= 0.005
    assert 0.1 < accuracy < 0.9


@pytest.mark.parametrize(
    ("theirs", "norm", "ours"),
    [
        ("fgsm", "l2", {"num_steps": 1, "step_size": 0.5}),
        ("fgsm", "l1", {"num_steps": 1, "step_size": 0.5}),
        ("mim-5", "l2", {"num_steps": 5, "step_size": 0.25, "decay": 1.0}),
        ("pgd-5", "l2", {"num_steps": 5, "step_size": 0.25}),
        ("mim-5", "linf", {"num_steps": 5, "step_size": 0.25, "decay": 0.5}),
    ],
)
def test_norms_default_step_and_decay(theirs, norm, ours):
    # In l2 cleverhans's PGD clips once more, before the projection: there with wide bounds.
    threat = he.ThreatModel(norm, 0.5, bounds=(-2, 3) if theirs == "pgd-5" else (-0.2, 1.1))
    batch = images() * 1.3 - 0.2
    options = {"decay": ours["decay"]} if "decay" in ours else {}
    options["stop_when_broken"] = False
    result = attacks.get(f"cleverhans:{theirs}", threat, **options)(linear, batch, labels())
    own = ProjectedGradient(
        threat, random_start=False, keep="last", stop_when_broken=False, **ours
    )(linear, batch, labels())
    np.testing.assert_allclose(result.x_adv, own.x_adv, atol=1e-5)
    assert result.distance.max() <= 0.5 + 1e-6


def test_wrong_examples_rest_and_passes_are_counted():
    result = Cleverhans(THREAT, "pgd-7", batch_size=8)(linear, images(), labels())
    wrong = linear(images()).numpy().argmax(axis=1) != labels()
    assert 0 < wrong.sum() < 20
    np.testing.assert_array_equal(result.x_adv[wrong], images()[wrong])
    np.testing.assert_array_equal(result.forward_passes, np.where(wrong, 1, 1 + 7 + 1))
    np.testing.assert_array_equal(result.backward_passes, np.where(wrong, 0, 7))
    fgsm = Cleverhans(THREAT, "fgsm")(linear, images(), labels())
    np.testing.assert_array_equal(fgsm.backward_passes, np.where(wrong, 0, 1))


@pytest.mark.parametrize("name", ["fgsm", "bim-5", "pgd-5", "mim-5"])
def test_same_result_again_and_for_every_batch_size(name):
    attack = attacks.get(f"cleverhans:{name}", THREAT)
    whole = attack(linear, images(), labels())
    np.testing.assert_array_equal(attack(linear, images(), labels()).x_adv, whole.x_adv)
    for batch_size in (1, 3, 16):
        other = attacks.get(f"cleverhans:{name}", THREAT, batch_size=batch_size)
        np.testing.assert_allclose(other(linear, images(), labels()).x_adv, whole.x_adv, atol=1e-6)


def test_few_traces_whatever_the_number_of_survivors():
    """cleverhans traces for every batch size, and here there are 8; the model is not among it."""
    counting = Counting(lambda batch: linear(batch))
    attack = Cleverhans(THREAT, "pgd-2", batch_size=32)
    right = linear(images(40)).numpy().argmax(axis=1)
    for count in range(25, 33):
        attack(counting, images(40)[:count], right[:count])
    # Each call probes twice, judges and scores; the model is traced for one size, then for all.
    assert counting.calls <= 8 * 4 + 2


def test_the_weights_of_now_are_attacked():
    layer = keras.layers.Dense(CLASSES, use_bias=False)
    classifier = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), layer])
    attack = Cleverhans(THREAT, "pgd-3", stop_when_broken=False)
    own = attacks.BIM(THREAT, 3, keep="last", stop_when_broken=False)
    for factor in (1.0, -1.0):
        layer.set_weights([weights() * factor])
        result = attack(classifier, images(), labels())
        expected = own(classifier, images(), labels())
        np.testing.assert_allclose(result.x_adv, expected.x_adv, atol=1e-6)


def test_one_attack_on_two_models():
    attack = Cleverhans(THREAT, "pgd-3", stop_when_broken=False)
    for classifier in (linear, lambda batch: -linear(batch), linear):
        expected = Cleverhans(THREAT, "pgd-3", stop_when_broken=False)
        expected = expected(classifier, images(), labels())
        np.testing.assert_array_equal(attack(classifier, images(), labels()).x_adv, expected.x_adv)


@pytest.mark.parametrize("name", ["fgsm", "pgd-3", "mim-3"])
def test_images_in_float64(name):
    result = Cleverhans(THREAT, name)(linear, images().astype("float64"), labels())
    expected = Cleverhans(THREAT, name)(linear, images(), labels())
    assert result.x_adv.dtype == np.float64
    np.testing.assert_allclose(result.x_adv, expected.x_adv, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "start", "radius"),
    [("pgd-1", True, 0.05), ("madry-1", None, 0.05), ("pgd-1", 0.02, 0.02)],
)
def test_random_start_from_the_global_seed(name, start, radius):
    def craft():
        attack = Cleverhans(
            THREAT, name, step_size=1e-6, random_start=start, stop_when_broken=False
        )
        return attack(linear, images() * 0.8 + 0.1, labels())

    tf.random.set_seed(1)
    first, second = craft(), craft()
    tf.random.set_seed(1)
    np.testing.assert_array_equal(craft().x_adv, first.x_adv)
    assert np.abs(first.x_adv - second.x_adv).max() > 0.01
    # 12 uniform draws for each image.
    assert 0.8 * radius < np.mean(first.distance) < radius + 2e-6 and first.distance.max() <= 0.0501


# C&W


def two_classes(batch):
    """With more, the search may end at the boundary of a class that is not the nearest.

    The boundary lies 0.2 from the image of 0.5 everywhere.
    """
    normal = weights()[:, 0] - weights()[:, 1]
    gap = tf.reshape(batch - 0.5, [-1, PIXELS]) @ normal[:, None] + 0.2 * np.linalg.norm(normal)
    return tf.concat([gap, tf.zeros_like(gap)], axis=1)


def test_cw_l2_finds_the_boundary_of_a_linear_model():
    batch = 0.5 + 0.02 * (images(2) - 0.5)
    logits = two_classes(tf.constant(batch)).numpy()
    right = logits.argmax(axis=1)
    normal = weights()[:, 0] - weights()[:, 1]
    exact = logits[:, 0] / np.linalg.norm(normal)
    threat = he.ThreatModel("l2", float(exact.mean()))
    attack = attacks.get("cleverhans:cw-l2-100", threat)
    result = attack(two_classes, batch, right)
    assert np.all(result.distance >= exact * (1 - 1e-5))
    assert np.all(result.distance <= exact * 1.002)
    np.testing.assert_array_equal(result.success, result.distance <= threat.epsilon)
    assert result.success.sum() == 1
    verdict = two_classes(tf.constant(result.x_nearest)).numpy().argmax(axis=1)
    np.testing.assert_array_equal(verdict, 1 - right)
    length = np.linalg.norm((result.x_nearest - batch).reshape(2, -1), axis=1)
    np.testing.assert_allclose(result.distance, length, rtol=1e-5)
    # One forward pass each for the clean check, cleverhans's guess, our verdict and the score.
    np.testing.assert_array_equal(result.forward_passes, result.backward_passes + 4)
    assert 100 < result.backward_passes.min() and result.backward_passes.max() <= 5 * 100


def test_cw_l2_leaves_wrong_examples_alone_and_says_where_it_found_nothing():
    attack = CleverhansCWL2(he.ThreatModel("l2", 0.5), num_steps=1, binary_search_steps=1)
    result = attack(linear, images(3), labels(3))
    wrong = linear(images(3)).numpy().argmax(axis=1) != labels(3)
    np.testing.assert_array_equal(wrong, [True, False, False])
    np.testing.assert_array_equal(result.distance, [0.0, np.inf, np.inf])
    np.testing.assert_array_equal(result.backward_passes, [0, 1, 1])
    np.testing.assert_array_equal(result.x_adv, images(3))


def test_cleverhans_alone_still_fails_where_we_say_so():
    from cleverhans.tf2.attacks.carlini_wagner_l2 import carlini_wagner_l2
    from cleverhans.tf2.attacks.spsa import spsa

    batch = tf.constant(images(1))
    with pytest.raises(TypeError, match="'list' object is not callable"):
        carlini_wagner_l2(linear, batch, max_iterations=2)
    with pytest.raises(ValueError, match="'lr'"):
        spsa(linear, batch, labels(1), 0.1, 2, 0.0, 1.0)
    with pytest.raises(ValueError, match='"spsa-K" of this package.*received attack='):
        Cleverhans(THREAT, "spsa-100")


# Names, configurations, errors


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fgsm", {}),
        ("PGD-7", {"random_start": 0.01}),
        ("bim", {"num_steps": 3, "step_size": "0.01"}),
        ("madry-4", {}),
        ("mim-6", {"decay": 0.5}),
        ("cw-l2-30", {"binary_search_steps": 2, "learning_rate": 0.1}),
    ],
)
def test_names_and_configurations(name, options):
    threat = L2 if name.startswith("cw") else THREAT
    attack = attacks.get(f"cleverhans:{name}", threat, seed=3, batch_size=9, **options)
    assert attack.name == f"cleverhans:{name}" and attack.batch_size == 9
    if name[-1].isdigit() and name != "cw-l2":
        assert attack.num_steps == int(name.rpartition("-")[2])
    data = json.loads(json.dumps(keras.saving.serialize_keras_object(attack)))
    again = keras.saving.deserialize_keras_object(data)
    assert type(again) is type(attack) and again.get_config() == attack.get_config()
    if not attack.minimum_norm and "random_start" not in options and name != "madry-4":
        first, second = (each(linear, images(), labels()) for each in (attack, again))
        np.testing.assert_array_equal(first.x_adv, second.x_adv)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hop-skip-jump", {}, "expected one of bim-K, cw-l2-K, fgsm, madry-K, mim-K, pgd"),
        ("pgd-", {}, "Unknown attack of cleverhans"),
        ("fgsm-3", {}, "Unknown attack of cleverhans.* fgsm, "),
        ("pgd-5", {"num_steps": 6}, "num_steps is given twice"),
        ("pgd-0", {}, "received num_steps=0"),
        ("pgd", {"step_size": 0.06}, "no step longer than epsilon; .*received step_size=0.06"),
        ("mim", {"step_size": 0}, "received step_size=0"),
        ("mim", {"decay": -1.0}, "expected a finite number >= 0.0; received decay=-1.0"),
        ("pgd", {"decay": 1.0}, "only one decay; expected decay=None; received decay=1.0"),
        ("mim", {"random_start": True}, "only one random_start; .*received random_start=True"),
        ("fgsm", {"num_steps": 3}, "only one num_steps; expected num_steps=1"),
        ("pgd", {"loss": "cw"}, "only one loss; expected loss='ce'; received loss='cw'"),
        ("pgd", {"random_start": "far"}, "received random_start='far'"),
        ("pgd", {"keep": "best"}, "expected keep='last'; received keep='best'"),
        ("cw-l2", {}, r"expected one of \('l2',\); received norm='linf'"),
    ],
)
def test_bad_arguments_are_refused_by_the_constructor(name, options, message):
    with pytest.raises(ValueError, match=message):
        attacks.get(f"cleverhans:{name}", THREAT, **options)


def test_norms_that_cleverhans_does_not_know():
    threat = he.ThreatModel("l1", 0.5)
    assert CleverhansFGSM(threat).threat.norm == "l1"
    for name in ("bim", "pgd", "mim", "cw-l2"):
        with pytest.raises(ValueError, match="not defined for this norm.*norm='l1'"):
            Cleverhans(threat, name)


def test_a_model_without_gradient_is_named():
    def rounded(batch):
        flat = tf.reshape(tf.cast(tf.cast(batch * 255, tf.uint8), tf.float32), [-1, PIXELS])
        return flat @ weights()

    right = rounded(tf.constant(images())).numpy().argmax(axis=1)
    for name, threat in (("fgsm", THREAT), ("pgd", THREAT), ("mim", THREAT), ("cw-l2", L2)):
        with pytest.raises(ValueError, match="needs gradients; expected .*; received"):
            Cleverhans(threat, name)(rounded, images(), right)


def test_cw_l2_takes_images_only():
    with pytest.raises(ValueError, match=r"expected shape \(n, height, width, channels\)"):
        flat = images().reshape(20, PIXELS)
        Cleverhans(L2, "cw-l2")(lambda batch: batch @ weights(), flat, labels())
