"""The contract of attacks: who is attacked, for how long, what is counted, what compiled."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from attack_victims import (
    CLASSES,
    PARITY,
    THREAT,
    cosine_model,
    images,
    labels,
    linear,
)

import he_keras as he
from he_keras import losses
from he_keras.attacks import (
    BIM,
    FGSM,
    PGD,
    AdaptivePGD,
    Victim,
)
from he_keras.attacks.framework.result import Goal

pytestmark = pytest.mark.usefixtures("op_by_op")

# Who is attacked, for how long, and what is counted.


def test_examples_that_are_all_wrong_never_reach_the_attack():
    """Models that cannot run on an empty batch must not be asked to."""

    def never_empty(batch):
        check = tf.debugging.assert_positive(tf.shape(batch)[0], "an empty batch")
        with tf.control_dependencies([check]):
            return linear(batch)

    right = linear(images()).numpy().argmax(axis=1)
    wrong = (right + 1) % CLASSES
    plain = PGD(THREAT, 3, batch_size=6)
    others = [{"loss": "kl"}, {"num_restarts": 3}, {"keep": "last"}]
    for attack in (plain, *(PGD(THREAT, 3, batch_size=6, **options) for options in others)):
        result = attack(never_empty, images(), wrong)
        assert result.success.all() and result.robust_accuracy == 0.0
        np.testing.assert_array_equal(result.x_adv, images())
        np.testing.assert_array_equal(result.forward_passes, 1)
        np.testing.assert_array_equal(result.backward_passes, 0)
    mixed = np.concatenate([wrong[:6], right[6:12], wrong[12:]])
    result = plain(never_empty, images(), mixed)
    np.testing.assert_array_equal(result.forward_passes[[*range(6), *range(12, 20)]], 1)
    assert np.all(result.forward_passes[6:12] > 1)


def test_ragged_batches():
    expected = BIM(THREAT, 4)(linear, images(), labels())
    attack = BIM(THREAT, 4, batch_size=8)
    for count in (1, 2, 7, 8, 9, 16, 17, 20):
        result = attack(linear, images()[:count], labels()[:count])
        np.testing.assert_allclose(result.x_adv, expected.x_adv[:count], atol=1e-6)
        np.testing.assert_array_equal(result.success, expected.success[:count])
        np.testing.assert_array_equal(result.forward_passes, expected.forward_passes[:count])


def test_stopping_early_changes_no_verdict():
    """Dropping broken rows, and padding what is left, must not mix up the others."""
    attack = functools.partial(BIM, he.ThreatModel("linf", 0.08), 12, step_size=0.008)
    stopped = attack()(linear, images(90), labels(90))
    whole = attack(stop_when_broken=False)(linear, images(90), labels(90))
    np.testing.assert_array_equal(stopped.success, whole.success)
    held = ~whole.success
    assert held.any()
    np.testing.assert_allclose(stopped.x_adv[held], whole.x_adv[held], atol=1e-6)
    # Where the last iterate is kept, it is the one that broke the example, not a later one.
    frozen = attack(keep="last")(linear, images(90), labels(90))
    np.testing.assert_array_equal(frozen.success, whole.success)
    np.testing.assert_allclose(frozen.x_adv, stopped.x_adv, atol=1e-6)
    spent = stopped.backward_passes[~held]
    assert len(set(spent.tolist())) > 3
    np.testing.assert_array_equal(whole.backward_passes, 12)


class Rows(tf.Module):
    """Counts the rows that really pass through the model, inside compiled loops too."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0)

    def __call__(self, batch):
        self.seen.assign_add(tf.shape(batch)[0])
        return linear(batch)


@pytest.mark.fast_cases("last-9", "best-9", "kl-9", "restarts-1")
@pytest.mark.parametrize("num_steps", [1, 9])
@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"keep": "last"}, 2),
        ({"keep": "best"}, 2),
        ({"keep": "best", "loss": "kl"}, 3),
        ({"keep": "best", "num_restarts": 3}, 2),
    ],
    ids=["last", "best", "kl", "restarts"],
)
def test_counted_passes_are_the_passes_made(num_steps, options, extra):
    model = Rows()
    attack = PGD(THREAT, num_steps, stop_when_broken=False, batch_size=8, **options)
    result = attack(model, images(), labels())
    runs = options.get("num_restarts", 1)
    np.testing.assert_array_equal(result.forward_passes, runs * (num_steps + extra))
    np.testing.assert_array_equal(result.backward_passes, runs * num_steps)
    probed = 8
    assert model.seen.numpy() == result.forward_passes.sum() + probed


def test_restarts_go_on_with_the_survivors_and_never_get_weaker():
    def passes(result):
        return result.forward_passes, result.backward_passes

    def margins(result):
        return losses.margin(linear(tf.constant(result.x_adv)), tf.constant(labels())).numpy()

    # Few short steps, so that the start decides.
    attack = functools.partial(PGD, he.ThreatModel("linf", 0.1), 2, step_size=0.01, batch_size=8)
    runs = [attack(num_restarts=count)(linear, images(), labels()) for count in (1, 2, 5)]
    broken = [run.success.sum() for run in runs]
    assert broken[0] < broken[-1] < len(labels())
    held_margins = [margins(run)[~runs[-1].success] for run in runs]
    assert held_margins[0].mean() > held_margins[-1].mean() + 1e-3
    for earlier, later in zip(runs, runs[1:], strict=False):
        done = earlier.success
        np.testing.assert_array_equal(later.x_adv[done], earlier.x_adv[done])
        assert np.all(later.success[done])
        assert np.all(margins(later)[~done] <= margins(earlier)[~done] + 1e-6)
        for before, after in zip(passes(earlier), passes(later), strict=True):
            np.testing.assert_array_equal(after[done], before[done])
            assert np.all(after[~done] > before[~done])
    held = ~runs[-1].success
    np.testing.assert_array_equal(runs[-1].backward_passes[held], 5 * 2)
    np.testing.assert_array_equal(runs[-1].forward_passes[held], 5 * (2 + 2))


def test_keep_last_returns_the_last_iterate_and_best_the_strongest():
    """The loss rises, then falls: with one pixel, from 0.5 upward to 0.7, past the peak at 0.6."""

    def peaked(batch):
        score = 5.0 - 100.0 * tf.square(batch[:, 0] - 0.6)
        # Ascending in x0 by construction, whatever the side of the peak.
        climb = batch[:, 0] - tf.stop_gradient(batch[:, 0])
        flat = tf.stop_gradient(score) + climb
        return tf.stack([10.0 * tf.ones_like(flat), flat], axis=1)

    threat, start = he.ThreatModel("linf", 0.2), np.array([[0.5]])
    settings = {"step_size": 0.05, "random_start": False, "stop_when_broken": False}
    last = PGD(threat, 4, keep="last", **settings)(peaked, start, np.array([0]))
    np.testing.assert_allclose(last.x_adv, [[0.7]], atol=1e-6)
    best = PGD(threat, 4, keep="best", **settings)(peaked, start, np.array([0]))
    np.testing.assert_allclose(best.x_adv, [[0.6]], atol=1e-6)
    assert best.forward_passes[0] == last.forward_passes[0]


@pytest.mark.parametrize("random_start", ["gaussian", 0.2], ids=["gaussian", "wide"])
def test_a_start_outside_the_ball_or_the_bounds_is_not_taken_for_a_success(random_start):
    """Misclassified only below 0, or only beyond epsilon: no allowed image is."""
    edge = 0.0 if random_start == "gaussian" else 0.5 - 0.06

    def below_the_edge(batch):
        score = 1e6 * (edge - batch[:, 0]) - 1.0
        return tf.stack([tf.zeros_like(score), score], axis=1)

    pixels = np.full((50, 1), 0.0 if random_start == "gaussian" else 0.5, np.float32)
    attack = PGD(THREAT, 3, step_size=1e-6, random_start=random_start)
    result = attack(below_the_edge, pixels, np.zeros(50, int))
    assert not result.success.any()
    np.testing.assert_array_equal(result.backward_passes, 3)


# Scale and margin.


def test_logit_scale_of_a_cosine_head_and_of_any_other():
    model, batch = cosine_model(), tf.constant(images())
    cosines = model.cosines(batch).numpy()
    chained = keras.Sequential([model.network, model.head])
    for wrapped in (model, chained):
        for logit_scale, factor in (("model", 15.0), ("unit", 1.0), (4.0, 4.0), (2, 2.0)):
            victim = Victim(wrapped, logit_scale)
            np.testing.assert_allclose(victim.logits(batch), factor * cosines, rtol=1e-5, atol=1e-6)
            assert victim.scale == factor
    for logit_scale, factor in (("model", 1.0), ("unit", 1.0), (4.0, 4.0)):
        victim = Victim(linear, logit_scale)
        np.testing.assert_allclose(victim.logits(batch), factor * linear(batch), rtol=1e-6)


def test_the_scale_changes_cross_entropy_attacks_but_not_the_margin_attack():
    # One l2 step shows the direction; signs would hide most of the change.
    model, threat = cosine_model(), he.ThreatModel("l2", 0.01)
    right = model(images()).numpy().argmax(axis=1)

    def perturbed(loss, logit_scale):
        attack = FGSM(threat, loss=loss, logit_scale=logit_scale, keep="last")
        return attack(model, images(), right).x_adv

    on_cosines = FGSM(threat, keep="last")(model.cosines, images(), right).x_adv
    np.testing.assert_allclose(perturbed("ce", "unit"), on_cosines, atol=1e-7)
    assert np.abs(perturbed("ce", "unit") - perturbed("ce", "model")).max() > 1e-4
    np.testing.assert_allclose(perturbed("cw", "unit"), perturbed("cw", "model"), atol=1e-6)


def test_the_adaptive_attack_takes_scale_and_margin_from_the_head():
    model = cosine_model()
    right = model(images()).numpy().argmax(axis=1)
    batch, targets = tf.constant(images()), tf.constant(right)
    cosines = model.cosines(batch).numpy().astype(np.float64)
    for logit_scale, scale in (("model", 15.0), ("unit", 1.0), (4.0, 4.0)):
        victim = Victim(model, logit_scale)
        logits = victim.logits(batch)
        for margin, expected_margin in (("model", 0.2), (0.3, 0.3), (0.0, 0.0)):
            attack = AdaptivePGD(THREAT, margin=margin)
            shifted = scale * (cosines - expected_margin * np.eye(CLASSES)[right])
            expected = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(20), right]
            loss = attack._loss(victim, logits, Goal(targets), ())
            np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    # A head without a margin: plain cross-entropy.
    logits = linear(batch)
    loss = AdaptivePGD(THREAT)._loss(Victim(linear), logits, Goal(targets), ())
    np.testing.assert_array_equal(loss, losses.cross_entropy(logits, targets))


def test_the_margin_alone_turns_no_step():
    """Cross-entropy is a rising function of `sum_k exp(o_k - o_y)`, which the margin only scales.

    So an adaptive attack that starts alike ends alike (but for momentum): what makes it stronger
    than the released evaluation is the scale.
    """
    model, threat = cosine_model(), he.ThreatModel("l2", 0.05)
    right = model(images()).numpy().argmax(axis=1)
    settings = {"num_steps": 3, **PARITY}
    adaptive = AdaptivePGD(threat, **settings)(model, images(), right).x_adv
    plain = PGD(threat, **settings)(model, images(), right).x_adv
    np.testing.assert_allclose(adaptive, plain, atol=1e-5)
    released = PGD(threat, logit_scale="unit", **settings)(model, images(), right).x_adv
    assert np.abs(released - plain).max() > 1e-3
