"""Checks after the attacks, on models small enough to know the answers; see also the zoo."""

import numpy as np
import pytest
import tensorflow as tf
from broken_models import THREAT, honest, masked_head, sample

import he_keras as he
from he_keras.attacks import Victim
from he_keras.evaluation.checks import epsilon_curve, sanity_checks
from he_keras.evaluation.checks.check import AttackedSample
from he_keras.evaluation.checks.planted import border_points, judge, plant, planted_adversarial
from he_keras.evaluation.checks.table import CHECKS, run_check

pytestmark = pytest.mark.slow
ROWS = {row.name: row for row in CHECKS}
STRENGTH = ("iterative-beats-single-step", "more-steps", "plateaued-loss", "more-restarts")
SCALE = ("loss-gap", "logit-rescale")

WEIGHTS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


def linear(images):
    return tf.reshape(images, [-1, 12]) @ WEIGHTS


def linear_sample(count=40):
    images = np.random.default_rng(1).uniform(size=(count, 2, 2, 3)).astype(np.float32)
    return images, linear(images).numpy().argmax(axis=1)


def linear_radii(images, labels):
    """The l_inf distance of each image to the nearest decision boundary, without pixel bounds."""
    logits = linear(images).numpy()
    rows = np.arange(len(labels))
    gaps = logits[rows, labels][:, np.newaxis] - logits
    lengths = np.abs(WEIGHTS.T[labels][:, np.newaxis] - WEIGHTS.T[np.newaxis]).sum(axis=2)
    gaps[rows, labels], lengths[rows, labels] = np.inf, 1.0
    return (gaps / lengths).min(axis=1)


def a_sample(model=linear, epsilon=0.05, norm="linf", count=40, **options):
    return AttackedSample(model, *linear_sample(count), he.ThreatModel(norm, epsilon), **options)


def run(name, sample):
    return run_check(ROWS[name], sample)


def run_all(names, sample):
    return {name: run(name, sample) for name in names}


def held(sample, count):
    """The sample, of which every attack leaves the first examples."""
    sample.run = lambda attack: np.arange(len(sample)) >= count
    return sample


def test_the_curve_of_a_linear_model_is_its_distribution_of_distances():
    images, labels = linear_sample()
    inside = 0.3 + 0.4 * images
    labels = linear(inside).numpy().argmax(axis=1)
    distances = linear_radii(inside, labels)
    epsilons = [0.01, 0.03, 0.1]
    curve = epsilon_curve(linear, inside, labels, he.ThreatModel("linf", 0.03), epsilons=epsilons)
    expected = [1.0, *[float((distances > epsilon).mean()) for epsilon in epsilons]]
    assert [point["accuracy"] for point in curve["points"]] == pytest.approx(expected)
    assert [point["epsilon"] for point in curve["points"]] == [0.0, *epsilons]
    assert curve["num_examples"] == 40 and curve["attack"] == "cw-linf-20 (margin)"


@pytest.mark.parametrize(("norm", "widest"), [("linf", 1.0), ("l2", np.sqrt(12)), ("l1", 12.0)])
def test_default_radii_reach_from_a_quarter_to_eight_epsilon_within_the_box(norm, widest):
    def measured(epsilon):
        threat = he.ThreatModel(norm, epsilon)
        points = epsilon_curve(linear, *linear_sample(2), threat, attack="fgsm")["points"]
        return [point["epsilon"] for point in points]

    np.testing.assert_allclose(measured(0.1), [0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8])
    expected = np.array([0.0, 0.125, 0.25, 0.5, 1.0]) * widest
    np.testing.assert_allclose(measured(0.5 * widest), expected)


def test_a_curve_by_an_attack_of_choice():
    threat = he.ThreatModel("l2", 0.1)
    curve = epsilon_curve(linear, *linear_sample(), threat, attack="fgsm", epsilons=[0.2])
    assert curve["attack"] == "fgsm" and len(curve["points"]) == 2
    for epsilons in ([0.0], [-1.0], [np.nan], [True], ["0.1"]):
        with pytest.raises(ValueError, match="epsilons"):
            epsilon_curve(linear, *linear_sample(), threat, epsilons=epsilons)


@pytest.mark.parametrize(
    ("regained", "verdict"), [(0, "pass"), (1, "pass"), (3, "warn"), (20, "fail")]
)
def test_what_is_broken_may_not_hold_at_a_larger_epsilon(regained, verdict):
    """However the accuracy falls meanwhile."""
    points = [{"epsilon": 0.1 * i, "accuracy": each} for i, each in enumerate([1, 0.5, 0.0])]
    curve = {"attack": "pgd", "num_examples": 100, "num_regained": regained, "points": points}
    assert run("monotone-in-epsilon", a_sample(curve=curve)).verdict == verdict


def test_an_attack_without_a_gradient_stays_where_it_starts():
    def flat(images):
        return linear(tf.stop_gradient(images)) + 0.0 * tf.reduce_sum(images)

    sample = a_sample(flat, num_queries=100)
    assert run("unbounded-attack", sample).verdict == "fail"
    assert run("planted-adversarial", sample).verdict == "fail"
    assert run("black-box", sample).fired


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "pass"), (0.25, "pass"), (0.75, "fail")])
def test_half_the_range_leaves_no_more_than_chance(share, verdict):
    sample = a_sample()
    sample.labels = np.arange(40) % 4
    assert run("half-range-attack", held(sample, int(share * 40))).verdict == verdict


@pytest.mark.parametrize(("count", "verdict"), [(0, "pass"), (1, "warn"), (20, "fail")])
def test_an_unbounded_attack_leaves_nothing(count, verdict):
    assert run("unbounded-attack", held(a_sample(), count)).verdict == verdict


def test_a_sound_attack_on_a_linear_model_is_at_its_limit():
    found = run_all(STRENGTH, a_sample())
    assert {check.verdict for check in found.values()} == {"pass"}


def test_steps_that_are_too_short_show():
    """One step of PGD and two: the second half of the way is not behind it."""
    sample = a_sample(num_steps=1)
    vars(sample.plain_attack)["step_size"] = 0.2 * sample.threat.epsilon
    found = run_all(STRENGTH, sample)
    assert found["plateaued-loss"].verdict == "warn"
    assert found["iterative-beats-single-step"].fired


def test_more_steps_and_restarts_that_find_more_show():
    """Each verdict of this model hangs on where the attack happens to look."""
    generator = tf.random.Generator.from_seed(1)

    def logits(images):
        return linear(images) + generator.normal([tf.shape(images)[0], 4], stddev=0.3)

    found = run_all(STRENGTH, a_sample(logits, num_steps=2))
    assert found["more-steps"].fired or found["more-restarts"].fired


def test_saturated_cross_entropy_shows_and_moderate_does_not():
    for scale, expected in [(1000.0, True), (5.0, False)]:
        sample = a_sample(lambda images, scale=scale: scale * linear(images), epsilon=0.1)
        found = run_all(SCALE, sample)
        assert [check.fired for check in found.values()] == [expected, expected]


def test_cosines_at_scale_1_hide_from_the_cross_entropy():
    found = checks_of_scale(1.0)
    assert found["loss-gap"].fired and found["logit-rescale"].fired


def checks_of_scale(scale):
    from broken_models import honest_cosine

    sampled = AttackedSample(honest_cosine(0, scale), *sample(), THREAT)
    return run_all(SCALE, sampled)


def test_a_head_that_hides_its_gradient_shows():
    sampled = AttackedSample(masked_head(), *sample(), THREAT)
    sampled.run(sampled.ascent())
    assert run("transfer-without-head", sampled).fired
    without_head = AttackedSample(honest(), *sample(), THREAT)
    assert run("transfer-without-head", without_head).verdict == "skipped"


def test_attacks_without_gradient_are_run_on_what_is_left_only():
    sample = a_sample()
    sample.unbroken[:] = False
    for check in run_all(("black-box", "random-noise"), sample).values():
        # On no example at all, neither says anything.
        assert check.verdict == "skipped"
    assert not sample.results


def test_random_noise_and_queries_find_what_was_left():
    sample = a_sample(epsilon=0.4, num_points=20, num_queries=50)
    assert run("random-noise", sample).verdict == "fail"
    assert run("black-box", sample).verdict == "fail"
    flat = AttackedSample(
        lambda x: x @ WEIGHTS, linear_sample()[0].reshape(-1, 12), linear_sample()[1], THREAT
    )
    assert run("black-box", flat).message.startswith("Square changes windows of images")


def test_verdicts_are_scored_again():
    sample = a_sample()
    sample.run(sample.ascent())
    silent_success = ROWS["silent-success"].function
    assert silent_success(sample).figure == "0 of 40 verdicts differ when scored again"
    rows, result = sample.results[0]
    result.success[:] = ~result.success
    assert silent_success(sample).verdict == "fail"
    result.success[:] = ~result.success
    result.x_adv[3] += 0.01
    assert silent_success(sample).figure.startswith("1 of 40")


def test_no_attack_of_the_evaluation_may_be_weaker_than_the_checks():
    sample = a_sample()
    broken = sample.run(sample.ascent())
    assert 3 < broken.sum() < 37
    assert run("worst-case-holds", sample).verdict == "skipped"
    everything, rest = np.ones(60, bool), ~broken
    for left, verdict in [
        ({"a": rest}, "pass"),
        ({"a": everything}, "fail"),
        ({"a": everything[:40], "b": rest}, "pass"),
    ]:
        sample.still_correct = left
        assert ROWS["worst-case-holds"].function(sample).verdict == verdict


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (lambda images: tf.nn.softmax(linear(images)), "probabilities"),
        (lambda images: tf.round(linear(images)), "gradient"),
        (lambda images: -linear(images), "correctly"),
    ],
)
def test_where_no_attack_can_run_all_is_skipped(model, word):
    found = sanity_checks(model, *linear_sample(), THREAT)
    assert [check.name for check in found] == [row.name for row in CHECKS if row.when == "after"]
    assert {check.verdict for check in found} == {"skipped"}
    assert all(word in check.message for check in found)


def test_fewer_images_than_asked_for():
    with pytest.raises(ValueError, match="num_examples"):
        sanity_checks(linear, *linear_sample(), THREAT, num_examples=0)
    assert len(AttackedSample(linear, *linear_sample(7), THREAT)) == 7


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_planted_points_lie_on_the_border_and_are_found(norm):
    threat = he.ThreatModel(norm, {"linf": 0.1, "l2": 0.4, "l1": 1.5}[norm])
    images = sample(20)[0] * 0.4 + 0.3
    points = border_points(images, threat, (0,))
    distances = threat.distance(tf.constant(points), tf.constant(images)).numpy()
    np.testing.assert_allclose(distances, threat.epsilon, rtol=1e-3)

    victim = Victim(honest())
    readouts = plant(victim.features, images, threat, seed=0)
    assert readouts.valid.all()
    for planted, expected in [(readouts.planted, True), (images, False)]:
        features = victim.features(tf.constant(planted)).numpy().astype(np.float64)
        scores = np.sum(features * readouts.weights, axis=1) - readouts.threshold
        assert ((scores > 0) == expected).all()


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_planted_adversarials_are_found_in_other_norms(norm):
    threat = he.ThreatModel(norm, {"l2": 0.4, "l1": 2.0}[norm])
    assert planted_adversarial(AttackedSample(honest(), *sample(), threat)).verdict == "pass"


@pytest.mark.parametrize(
    ("found", "total", "verdict"),
    [(16, 16, "pass"), (14, 16, "pass"), (13, 16, "warn"), (8, 16, "warn"), (7, 16, "fail")]
    + [(114, 120, "pass"), (109, 120, "warn"), (3, 4, "pass"), (2, 4, "warn"), (27, 32, "warn")],
)
def test_a_few_misses_are_no_warning(found, total, verdict):
    """An honest network, with 114 of 120 found, got a warning for 14 of its first 16."""
    assert judge(found, total, 0).verdict == verdict


def test_nothing_can_be_planted_where_features_are_constant():
    found = planted_adversarial(a_sample(lambda x: 0.0 * linear(x)))
    assert found.verdict == "skipped"
