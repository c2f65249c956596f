"""Training objectives: contract, configuration, passes through the network, batch norm, noise."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_objectives import (
    MOMENTUM,
    SHAPE,
    THREAT,
    CallCounter,
    build_model,
    examples,
    moving_statistics,
    train_one_step,
)

import he_keras as he
from he_keras import objectives

NUM_STEPS = 3
OBJECTIVES = {
    "standard": objectives.Standard,
    "pgd_at": lambda: objectives.PGDAT(THREAT, NUM_STEPS),
    "alp": lambda: objectives.ALP(THREAT, num_steps=NUM_STEPS),
    "trades": lambda: objectives.TRADES(THREAT, num_steps=NUM_STEPS),
    "mart": lambda: objectives.MART(THREAT, num_steps=NUM_STEPS),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=2),
    "n_fgsm": lambda: objectives.NFGSM(THREAT),
    "n_fgsm released": lambda: objectives.NFGSM(THREAT, attack_training_mode=True),
    "fast_at": lambda: objectives.FastAT(THREAT),
    "fast_at released": lambda: objectives.FastAT(THREAT, attack_training_mode=True),
}
WITH_ATTACK_IN_INFERENCE_MODE = [name for name in OBJECTIVES if not name.endswith("released")]


def test_registered_names():
    assert {"standard", "pgd_at", "alp", "trades", "free_at", "fast_at", "mart", "n_fgsm"} <= set(
        objectives.names()
    )
    for name in objectives.names():
        assert objectives.get(name, THREAT).threat == THREAT


def test_options_reach_the_objective():
    objective = objectives.get("trades", THREAT, beta=3.0, num_steps=7, step_size="2/255")
    assert (objective.beta, objective.attack.num_steps) == (3.0, 7)
    assert objective.attack.step_size == pytest.approx(2 / 255)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of alp, .*; received 'trade'"):
        objectives.get("trade", THREAT)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: objectives.PGDAT(None), "needs a threat model"),
        (lambda: objectives.FreeAT(None), "needs a threat model"),
        (lambda: objectives.FastAT(None), "needs a threat model"),
        (lambda: objectives.PGDAT(THREAT, num_steps=0), "num_steps=0"),
        (lambda: objectives.PGDAT(THREAT, step_size=0.0), "step_size=0.0"),
        (lambda: objectives.PGDAT(THREAT, random_start="uniform"), "random_start='uniform'"),
        (lambda: objectives.TRADES(THREAT, random_start=False), "zero gradient"),
        (lambda: objectives.TRADES(THREAT, divergence="js"), "divergence='js'"),
        (lambda: objectives.TRADES(THREAT, beta=-1.0), "beta=-1.0"),
        (lambda: objectives.ALP(THREAT, beta=float("nan")), "beta=nan"),
        (lambda: objectives.ALP(THREAT, pairing="l1"), "pairing='l1'"),
        (lambda: objectives.ALP(THREAT, clean_weight=1.5), "clean_weight=1.5"),
        (lambda: objectives.FreeAT(THREAT, num_replays=0), "num_replays=0"),
        (lambda: objectives.FreeAT(THREAT, step_size=-0.1), "step_size=-0.1"),
        (lambda: objectives.FastAT(THREAT, initialization="previous"), "initialization='previous'"),
    ],
)
def test_bad_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=f"expected .*{message}|{message}.*expected"):
        build()


def test_threat_must_be_a_threat_model():
    with pytest.raises(TypeError, match="expected a ThreatModel; received threat=0.03"):
        objectives.PGDAT(0.03)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_configuration_is_plain_data_and_comes_back(name):
    objective = OBJECTIVES[name]()
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is type(objective)
    assert restored.get_config() == objective.get_config()
    assert restored.batch_norm_passes == objective.batch_norm_passes


def test_configuration_keeps_what_is_not_the_default():
    objective = objectives.TRADES(
        he.ThreatModel("l2", 0.5, bounds=(-1, 1)),
        beta=2.0,
        divergence="cross-entropy",
        num_steps=4,
        step_size=0.2,
        random_start=0.1,
    )
    restored = objectives.TRADES.from_config(objective.get_config())
    assert restored.threat == objective.threat
    assert (restored.beta, restored.divergence) == (2.0, "cross-entropy")
    attack = restored.attack
    assert (attack.num_steps, attack.step_size, attack.random_start) == (4, 0.2, 0.1)
    alp = objectives.ALP(THREAT, 0.5, 0.3, "l2", True, num_steps=2)
    assert objectives.ALP.from_config(alp.get_config()).get_config() == alp.get_config()


def test_defaults_are_the_released_ones():
    threat = he.ThreatModel("linf", 0.031)
    attack = objectives.PGDAT(threat).attack
    assert (attack.num_steps, attack.random_start) == (10, "gaussian")
    assert attack.step_size == pytest.approx(0.007)
    assert (attack.keep, attack.stop_when_broken) == ("last", False)
    assert objectives.TRADES(threat).beta == 6.0
    assert objectives.FastAT(threat).attack.step_size == pytest.approx(1.25 * 0.031)
    assert objectives.FreeAT(threat).step_size == pytest.approx(0.031)


PASSES = {
    "standard": [True],
    "pgd_at": [False] * NUM_STEPS + [True],
    "alp": [False] * NUM_STEPS + [True] * 2,
    # One more than ALP: the clean prediction for the adversary, once per batch.
    "trades": [False] * (NUM_STEPS + 1) + [True] * 2,
    "mart": [False] * NUM_STEPS + [True] * 2,
    "free_at": [True] * 2,
    "n_fgsm": [False, True],
    "n_fgsm released": [True, True],
    "fast_at": [False, True],
    "fast_at released": [True, True],
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_number_and_mode_of_forward_passes(name):
    """TRADES predicts the clean images once per batch, not once per step of the adversary."""
    counter = CallCounter()
    model = build_model(OBJECTIVES[name](), counter=counter)
    counter.flags.clear()
    train_one_step(model, *examples(), run_eagerly=True)
    assert counter.flags == PASSES[name]


@pytest.mark.fast_cases("pgd_at", "trades", "free_at", "n_fgsm released", "fast_at")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_norm_statistics_come_from_the_documented_passes(name):
    """Moving statistics after a step equal NumPy updates from these passes, in this order."""
    images, labels = examples()
    model = build_model(OBJECTIVES[name]())
    inputs = {"clean": images, **adversarial_inputs(name, model, images, labels)}
    expected = np.stack([np.zeros(9), np.ones(9)])
    passes = model.objective.batch_norm_passes
    repeated = [f"replay {n}" for n in (0, 1)] if name == "free_at" else passes
    for each in repeated:
        flat = inputs[each].reshape(len(images), -1).astype(np.float64)
        batch = np.stack([flat.mean(axis=0), flat.var(axis=0)])
        expected = MOMENTUM * expected + (1 - MOMENTUM) * batch
    # In graph mode it also matters that assignments happen, and in this order.
    train_one_step(model, images, labels, run_eagerly=name not in IN_GRAPH_MODE)
    np.testing.assert_allclose(moving_statistics(model), expected, atol=2e-6)
    assert passes == BATCH_NORM_PASSES[name]


IN_GRAPH_MODE = ("trades", "free_at", "fast_at released", "n_fgsm released")
BATCH_NORM_PASSES = {
    "standard": ("clean",),
    "pgd_at": ("adversarial",),
    "alp": ("clean", "adversarial"),
    "trades": ("clean", "adversarial"),
    "mart": ("clean", "adversarial"),
    "free_at": ("adversarial",),
    "n_fgsm": ("adversarial",),
    "n_fgsm released": ("attack", "adversarial"),
    "fast_at": ("adversarial",),
    "fast_at released": ("attack", "adversarial"),
}


def adversarial_inputs(name, model, images, labels):
    """What the training passes see, from a twin with the same weights and seed."""
    twin = build_model(OBJECTIVES[name]())
    twin.set_weights(model.get_weights())
    if name == "free_at":
        # The noise after one replay is what a twin with a single replay leaves behind.
        single = build_model(objectives.FreeAT(THREAT, num_replays=1))
        single.set_weights(model.get_weights())
        train_one_step(single, images, labels, run_eagerly=True)
        noise = single.objective.state_arrays()["noise_0"]
        return {"replay 0": images, "replay 1": np.clip(images + noise, 0, 1)}
    crafted = twin.objective.craft(twin, tf.constant(images), tf.constant(labels), (0, 0))
    radius = 0.2 if name == "n_fgsm released" else None
    start = THREAT.random_start(tf.constant(images), (0, 0), radius).numpy()
    return {"adversarial": crafted.numpy(), "attack": start}


@pytest.mark.parametrize("name", WITH_ATTACK_IN_INFERENCE_MODE)
def test_crafting_changes_no_weight_and_no_statistic(name):
    model = build_model(OBJECTIVES[name]())
    before = model.get_weights()
    x_adv = model.objective.craft(model, *map(tf.constant, examples()))
    assert x_adv.shape == (6, *SHAPE)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", ["pgd_at", "trades", "mart", "n_fgsm", "fast_at"])
def test_no_gradient_flows_through_the_crafted_examples(name):
    model = build_model(OBJECTIVES[name]())
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model.objective.craft(model, *map(tf.constant, examples())))
    assert all(gradient is None for gradient in tape.gradient(total, model.trainable_variables))


@pytest.mark.parametrize("name", ["pgd_at", "alp", "trades", "mart", "fast_at"])
def test_crafted_examples_are_reproducible_and_feasible(name):
    model = build_model(OBJECTIVES[name]())
    images, labels = map(tf.constant, examples())
    first, again, other = (
        model.objective.craft(model, images, labels, seed).numpy()
        for seed in ((4, 1), (4, 1), (4, 2))
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.abs(first - images).max() <= 0.1 + 1e-6
    assert (first >= 0).all() and (first <= 1).all()


@pytest.mark.fast_cases("pgd_at", "trades", "fast_at")
@pytest.mark.parametrize("name", ["pgd_at", "alp", "trades", "mart", "n_fgsm", "fast_at"])
def test_margin_acts_in_the_loss_and_not_in_the_attack(name):
    images, labels = map(tf.constant, examples())
    crafted, losses = [], []
    weights = build_model(OBJECTIVES[name]()).get_weights()
    for margin in (0.0, 0.3):
        model = build_model(OBJECTIVES[name](), he.CosineHead(4, scale=5.0, margin=margin))
        model.set_weights(weights)
        crafted.append(model.objective.craft(model, images, labels).numpy())
        loss = model.objective.loss(model, images, labels, images, training=False)
        losses.append(loss.numpy())
    np.testing.assert_array_equal(*crafted)
    assert (losses[1] > losses[0] + 0.1).all()


def test_loss_is_a_plain_function_of_the_given_examples():
    """A stored adversarial batch can be fed in; the result has one entry for each example."""
    model = build_model(objectives.PGDAT(THREAT), batch_norm=False)
    images, labels = examples()
    x_adv = np.clip(images + 0.05, 0, 1)
    losses = model.objective.loss(model, images, labels, x_adv, training=True).numpy()
    logits = model.head.with_margin(model(x_adv, training=False), labels).numpy()
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = -np.log(shifted[np.arange(6), labels] / shifted.sum(axis=1))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_new_objective_needs_craft_and_forward_only():
    class NoisyTraining(objectives.Objective):
        def craft(self, model, images, labels, seed=(0, 0)):
            return self.threat.random_start(images, seed)

        def forward(self, model, images, labels, x_adv, training=True):
            logits = model(x_adv, training=training)
            return objectives.TrainingPass(he.losses.cross_entropy(logits, labels), logits)

    model = build_model(NoisyTraining(THREAT))
    before = model.head.get_weights()[0]
    train_one_step(model, *examples(), run_eagerly=True)
    assert np.abs(model.head.get_weights()[0] - before).max() > 1e-4


def test_an_objective_that_writes_nothing_trains_on_clean_images_as_standard_does():
    model = build_model(objectives.Objective(THREAT))
    images, labels = examples()
    crafted = model.objective.craft(model, images, labels)
    np.testing.assert_array_equal(crafted, images)
    ours = model.objective.loss(model, images, labels, crafted, training=False)
    standard = objectives.Standard().loss(model, images, labels, crafted, training=False)
    np.testing.assert_array_equal(ours, standard)


def test_noise_grows_persists_and_serves_short_batches():
    model = build_model(OBJECTIVES["free_at"](), batch_norm=False)
    images, labels = examples()
    assert model.objective.state_arrays()["noise_0"].shape == (0, *SHAPE)
    train_one_step(model, images[:4], labels[:4], run_eagerly=True)
    first = model.objective.state_arrays()["noise_0"]
    assert first.shape == (4, *SHAPE)
    assert np.abs(first).max() == pytest.approx(0.1, abs=1e-6)
    train_one_step(model, images[:2], labels[:2], run_eagerly=True)
    second = model.objective.state_arrays()["noise_0"]
    np.testing.assert_array_equal(second[2:], first[2:])  # rows that a short batch does not have
    train_one_step(model, images, labels, run_eagerly=True)
    assert model.objective.state_arrays()["noise_0"].shape == (6, *SHAPE)


def test_free_at_leaves_the_noise_of_saturated_pixels():
    objective = objectives.FreeAT(THREAT)
    objective.build(SHAPE)
    white = tf.ones([1, *SHAPE])
    objective.noise.put_first_rows(tf.fill(white.shape, 0.05))
    objective.after_update(white, white, -white, objectives.TrainingStep())
    np.testing.assert_allclose(objective.state_arrays()["noise_0"], 0.05)


def test_free_at_keeps_its_noise_in_a_euclidean_ball():
    threat = he.ThreatModel("l2", 0.5)
    model = build_model(objectives.FreeAT(threat, num_replays=3, step_size="3/10"))
    train_one_step(model, *examples(), run_eagerly=True)
    noise = model.objective.state_arrays()["noise_0"]
    lengths = np.linalg.norm(noise.reshape(6, -1), axis=1)
    assert (lengths <= 0.5 + 1e-6).all() and (lengths > 0.3).all()
    assert np.isclose(lengths, 0.5).any()


@pytest.mark.slow
def test_free_at_replays_alike_in_a_loop_and_written_out():
    """Also where the step makes the optimizer's variables itself, which a loop could not."""
    models = [build_model(objectives.FreeAT(THREAT, num_replays=4)) for _ in range(3)]
    train_one_step(models[0], *examples(), run_eagerly=True)
    train_one_step(models[1], *examples())
    images, labels = examples()
    models[2].compile(optimizer=keras.optimizers.SGD(0.1))
    assert np.isfinite(tf.function(lambda: models[2].train_step((images, labels)))()["loss"])
    assert [int(model.optimizer.iterations) for model in models] == [4, 4, 4]
    noise = [model.objective.state_arrays()["noise_0"] for model in models]
    for model, each in zip(models[1:], noise[1:], strict=True):
        np.testing.assert_allclose(each, noise[0], atol=1e-6)
        for ours, theirs in zip(model.get_weights(), models[0].get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", [3, 8])
def test_free_at_traces_two_replays_whatever_their_number(num_replays):
    """The first, and the loop of the others: the time to the first step does not grow."""
    counter = CallCounter()
    model = build_model(objectives.FreeAT(THREAT, num_replays=num_replays), counter=counter)
    counter.flags.clear()
    train_one_step(model, *examples())
    assert len(counter.flags) == 2


def test_free_at_updates_the_weights_in_every_replay():
    model = build_model(objectives.FreeAT(THREAT, num_replays=5))
    train_one_step(model, *examples(), run_eagerly=True)
    assert int(model.optimizer.iterations) == 5
