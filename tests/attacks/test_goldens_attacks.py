"""FGSM, BIM, PGD, MIM, margin-PGD, l2-PGD and TRADES' KL attack against stored and live references.

What is compared, and how closely, is set by `goldens/README.md` sections 3 and 9 and by
`goldens/tolerances.json`.
"""

import functools

import golden_models
import numpy as np
import pytest
import tensorflow as tf
from golden_attacks import differing_pixels

import he_keras as he
from he_keras import losses
from he_keras.attacks import ProjectedGradient, Victim

pytestmark = pytest.mark.usefixtures("op_by_op")

# How the reference tools run and score: every example to its end, the last iterate.
PARITY = {"keep": "last", "stop_when_broken": False, "random_start": False}
SIGN_ATTACKS = {
    "fgsm": {"num_steps": 1, "step_size": "8/255"},
    "bim10": {"num_steps": 10, "step_size": "2/255"},
    "pgd20_2_255": {"num_steps": 20, "step_size": "2/255"},
    "pgd20_0.003": {"num_steps": 20, "step_size": 0.003},
    "mim20_2_255": {"num_steps": 20, "step_size": "2/255", "decay": 1.0},
    "mim20_eps_20": {"num_steps": 20, "step_size": golden_models.EPSILON / 20, "decay": 1.0},
    "pgd20_cw_2_255": {"num_steps": 20, "step_size": "2/255", "loss": "cw"},
    "pgd20_cw_0.003": {"num_steps": 20, "step_size": 0.003, "loss": "cw"},
}
KL_ATTACKS = {
    "trades_kl_0.031_0.007": (0.031, 0.007),
    "trades_kl_8_255_2_255": ("8/255", "2/255"),
}
LINF = he.ThreatModel("linf", "8/255")

both_heads = pytest.mark.parametrize("head", golden_models.HEADS)


@functools.cache
def model(head):
    """The golden model; call this outside `tf.function`, where weights could not be set."""
    return golden_models.classifier(head)


def check_scores(head, x_adv, stored, allowed, distance_error=1e-4):
    """Compares flags, losses and distances of all 64 samples, under the float64 network."""
    labels = golden_models.labels()
    logits = golden_models.float64_logits(head, x_adv)
    flags = logits.argmax(axis=1) != labels
    assert np.sum(flags != stored["success"]) <= allowed["flags_max_mismatch"]
    error = np.abs(golden_models.cross_entropy(logits, labels) - stored["ce"])
    assert np.quantile(error, 0.95) < allowed["ce_abs_p95"]
    difference = (x_adv - golden_models.images()).reshape(64, -1).astype(np.float64)
    for norm, order in (("linf", np.inf), ("l2", 2)):
        distance = np.linalg.norm(difference, order, axis=1)
        relative = np.abs(distance / stored[norm] - 1)
        assert np.quantile(relative, 0.95) < distance_error, norm


@both_heads
def test_the_models_are_the_reference_models(head):
    reference = golden_models.arrays(f"forward_{head}")
    images = golden_models.images()
    np.testing.assert_allclose(model(head)(images), reference["logits"], atol=1e-5, rtol=0)
    wrapped = golden_models.adversarial_model(head)
    np.testing.assert_allclose(wrapped(images), reference["logits"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(wrapped.features(images), reference["features"], atol=1e-4, rtol=0)
    exact = golden_models.float64_logits(head, images)
    np.testing.assert_allclose(exact, reference["logits_float64"], atol=1e-12, rtol=0)
    if head == "he":
        np.testing.assert_allclose(wrapped.cosines(images), reference["cos"], atol=1e-6, rtol=0)


@pytest.mark.fast_cases("fgsm-linear", "fgsm-he", "pgd20_2_255-linear", "mim20_2_255-he")
@both_heads
@pytest.mark.parametrize("attack", SIGN_ATTACKS)
def test_sign_attacks_give_the_stored_images(head, attack):
    stored = golden_models.outputs("linf", head, attack)
    allowed = golden_models.tolerances(head, attack)
    run = ProjectedGradient(LINF, **PARITY, **SIGN_ATTACKS[attack])
    result = run(model(head), golden_models.images(), golden_models.labels())
    check_scores(head, result.x_adv, stored, allowed)
    assert np.sum(result.success != stored["success"]) <= allowed["flags_max_mismatch"]
    np.testing.assert_allclose(result.distance, stored["linf"], atol=1e-6)
    assert differing_pixels(result.x_adv, stored["x_adv"]).mean() <= allowed["pix_frac_mean"]
    # All samples are equal to 5e-9, except one of he/pgd20_cw_2_255 (0.3 % of its pixels): there a
    # few gradients are so close to zero that rounding decides their sign. Another CPU may move one.
    difference = np.abs(result.x_adv[: len(stored["x_adv"])] - stored["x_adv"])
    unequal = np.sum(difference.max(axis=(1, 2, 3)) > 1e-6)
    assert unequal <= max(1, 0.01 * len(difference))


@pytest.mark.fast_cases("he")
@both_heads
def test_l2_pgd_gives_the_stored_images(head):
    stored = golden_models.outputs("l2", head, "pgd20_l2")
    allowed = golden_models.tolerances(head, "pgd20_l2")
    run = ProjectedGradient(he.ThreatModel("l2", 0.5), 20, 0.1, **PARITY)
    result = run(model(head), golden_models.images(), golden_models.labels())
    check_scores(head, result.x_adv, stored, allowed)
    assert np.sum(result.success != stored["success"]) <= allowed["flags_max_mismatch"]
    np.testing.assert_allclose(result.distance, stored["l2"], atol=1e-5)
    assert differing_pixels(result.x_adv, stored["x_adv"]).mean() <= allowed["pix_frac_mean"]
    np.testing.assert_allclose(
        result.x_adv[: len(stored["x_adv"])], stored["x_adv"], atol=1e-5, rtol=0
    )


@pytest.mark.fast_cases("trades_kl_0.031_0.007-linear", "trades_kl_8_255_2_255-he")
@both_heads
@pytest.mark.parametrize("attack", KL_ATTACKS)
def test_kl_attack_from_the_released_start(head, attack):
    stored = golden_models.outputs("other", head, attack)
    allowed = golden_models.tolerances(head, attack)
    epsilon, step_size = KL_ATTACKS[attack]
    noise = golden_models.arrays(f"attacks_other_{head}")["trades_noise_int8"]
    run = ProjectedGradient(
        he.ThreatModel("linf", epsilon),
        num_steps=10,
        step_size=step_size,
        loss="kl",
        keep="last",
        stop_when_broken=False,
    )
    images, labels = tf.constant(golden_models.images()), tf.constant(golden_models.labels())
    start = images + np.float32(0.001) * (noise.astype(np.float32) / 32)
    victim = Victim(model(head))
    ascend = tf.function(lambda begin: run.ascend(victim, images, labels, begin))
    x_adv = ascend(start).x_adv.numpy()
    check_scores(head, x_adv, stored, allowed, distance_error=5e-3)
    divergence = losses.kl_divergence(model(head)(images), model(head)(x_adv)).numpy()
    assert np.quantile(np.abs(divergence - stored["kl"]), 0.95) < allowed["ce_abs_p95"]
    np.testing.assert_allclose(divergence, stored["kl"], atol=2e-3)
    # The worst sample is left out. Near the image the gradient of the divergence is mostly rounding
    # noise, and sample 8 of he/trades_kl_8_255_2_255 takes another path (8 % of its pixels, 61 % of
    # all that differ); the same attack on the network in float64 takes that other path too.
    differing = np.sort(differing_pixels(x_adv, stored["x_adv"]))[:-1]
    assert differing.mean() <= allowed["pix_frac_mean"]


def cleverhans_settings():
    """Attack of cleverhans, its settings, the norm and epsilon, and the same in our words."""
    linf, l2 = (np.inf, golden_models.EPSILON), (2, 0.5)
    loop = {"eps_iter": 2 / 255, "nb_iter": 20}
    ours = {"num_steps": 20, "step_size": "2/255"}
    l2_loop = {"eps_iter": 0.1, "nb_iter": 10}
    l2_ours = {"num_steps": 10, "step_size": 0.1}
    momentum = {"decay": 1.0}
    return {
        "fgsm-linf": ("fast_gradient_method", {}, linf, {"num_steps": 1, "step_size": "8/255"}),
        "fgsm-l2": ("fast_gradient_method", {}, l2, {"num_steps": 1, "step_size": 0.5}),
        "pgd-linf": ("projected_gradient_descent", {"rand_init": False, **loop}, linf, ours),
        "mim-linf": ("momentum_iterative_method", loop, linf, {**ours, **momentum}),
        "mim-l2": ("momentum_iterative_method", l2_loop, l2, {**l2_ours, **momentum}),
    }


@pytest.mark.fast_cases("fgsm-l2-linear", "mim-l2-he")
@both_heads
@pytest.mark.parametrize("name", cleverhans_settings())
def test_cleverhans_gives_the_same_images(head, name):
    import importlib

    classifier = model(head)
    function_name, settings, (order, epsilon), ours = cleverhans_settings()[name]
    module = importlib.import_module(f"cleverhans.tf2.attacks.{function_name}")
    norm = "linf" if order == np.inf else "l2"
    images, labels = golden_models.images(), golden_models.labels()
    expected = getattr(module, function_name)(
        lambda batch: classifier(batch, training=False),
        tf.constant(images),
        eps=epsilon,
        norm=order,
        clip_min=0.0,
        clip_max=1.0,
        y=tf.constant(labels),
        **settings,
    ).numpy()
    run = ProjectedGradient(he.ThreatModel(norm, epsilon), **PARITY, **ours)
    x_adv = run(classifier, images, labels).x_adv
    difference = np.abs(x_adv - expected).max(axis=(1, 2, 3))
    # A sign at a gradient of zero within rounding may differ in one sample.
    assert np.sum(difference > 1e-6) <= 1
    assert differing_pixels(x_adv, expected).max() < 1e-2
