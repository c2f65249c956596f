"""Objectives with a scheduled radius and step size: closed forms, a radius of 0, saving, logs."""

import json

import keras
import numpy as np
import numpy_training as closed_form
import pytest
import tensorflow as tf
from closed_form_objectives import HEADS, THREAT, examples
from numpy_training import BATCH_SIZE, EPSILON, LEARNING_RATE, NUM_STEPS, SEED, SHAPE, STEP_SIZE
from replicated_training import mirrored

import he_keras as he
from he_keras import objectives, schedules
from he_keras.threat import with_radius

# The radius of each step: also 0, also shrinking.
RADII = (0.07, 0.02, 0.0, 0.05)
SCHEDULE = schedules.PiecewiseLinear(range(len(RADII)), RADII)


class ScheduledPGDAT(closed_form.PGDAT):
    def craft(self, x, labels, step):
        step_size = STEP_SIZE * RADII[step] / (EPSILON + 1e-6)
        return closed_form.ascend(self.head, x, labels, x, NUM_STEPS, step_size)


class ScheduledFastAT(closed_form.FastATRandom):
    def craft(self, x, labels, step):
        step_size = 1.25 * EPSILON * RADII[step] / (EPSILON + 1e-6)
        return closed_form.ascend(self.head, x, labels, self.start(x, step), 1, step_size)


class ScheduledFreeAT(closed_form.FreeAT):
    def step(self, x, labels, step):
        self.noise = np.clip(self.noise, -closed_form.EPSILON, closed_form.EPSILON)
        return super().step(x, labels, step)


class ScheduledNFGSM(closed_form.Trainer):
    def craft(self, x, labels, step):
        noise = tf.random.stateless_uniform([len(x), *SHAPE], [SEED, step], -1.0, 1.0).numpy()
        noisy = np.clip(x + 2 * RADII[step] * noise.reshape(len(x), -1), 0.0, 1.0)
        _, residual = closed_form.cross_entropy(self.head.logits(noisy), labels)
        sign = np.sign(self.head.backward(noisy, residual)[1])
        return np.clip(noisy + RADII[step] * EPSILON / (EPSILON + 1e-6) * sign, 0.0, 1.0)


def iterated(build, **options):
    return build(THREAT, num_steps=NUM_STEPS, step_size=STEP_SIZE, **options)


# NumPy trainer, objective, updates of a batch.
CASES = {
    "pgd-at": (ScheduledPGDAT, lambda **o: iterated(objectives.PGDAT, random_start=False, **o), 1),
    "fast-at": (ScheduledFastAT, lambda **o: objectives.FastAT(THREAT, **o), 1),
    "free-at": (ScheduledFreeAT, lambda **o: objectives.FreeAT(THREAT, num_replays=3, **o), 3),
    "n-fgsm": (ScheduledNFGSM, lambda **o: objectives.NFGSM(THREAT, **o), 1),
}
EVERY = {
    "pgd_at": {"num_steps": 2, "random_start": 0.05},
    "trades": {"num_steps": 2},
    "alp": {"num_steps": 2},
    "mart": {"num_steps": 2},
    "fast_at": {"initialization": "zero"},
    "free_at": {"num_replays": 2},
    "n_fgsm": {},
}


def flat_model(objective, head="linear", attack=None):
    network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(network, HEADS[head][1](), objective, attack, seed=SEED)
    generator = np.random.default_rng(11)
    model.head.set_weights([generator.normal(0.0, 1.0, v.shape) for v in model.head.weights])
    return model


def train(model, epochs=1, eagerly=True, count=6, **options):
    model.compile(optimizer=keras.optimizers.SGD(LEARNING_RATE, **options), run_eagerly=eagerly)
    x, y = (part[:count] for part in examples())
    return model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0).history


@pytest.mark.parametrize("name", CASES)
def test_weights_match_the_closed_form_at_every_radius(name, monkeypatch):
    trainer, make_objective, updates = CASES[name]
    schedule = schedules.PiecewiseLinear(np.arange(len(RADII)) * updates, RADII)
    model = flat_model(make_objective(epsilon_schedule=schedule), "he")
    (before,) = model.head.get_weights()
    expected = trainer(HEADS["he"][0]([before.astype(np.float64)]))
    history = train(model, epochs=2)
    x, y = examples()
    rows, flat = [slice(0, 4), slice(4, 6)] * 2, x.reshape(6, -1).astype(np.float64)
    losses = []
    for step, each in enumerate(rows):
        monkeypatch.setattr(closed_form, "EPSILON", RADII[step])
        # A replay of FreeAT is a step of its own for the seeds of random starts only.
        losses.append(expected.step(flat[each], y[each], step))
    np.testing.assert_allclose(model.head.get_weights(), expected.head.weights, atol=2e-6)
    assert np.abs(model.head.get_weights()[0] - before).max() > 0.02
    np.testing.assert_allclose(history["loss"][1], np.concatenate(losses[2:]).mean(), rtol=1e-5)
    np.testing.assert_allclose(history["epsilon"], [RADII[1], RADII[3]], atol=1e-8)
    # The objective itself keeps the nominal radius.
    assert model.objective.threat == THREAT


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_radius_of_zero_leaves_the_images_alone(name, norm):
    zero = schedules.Linear(0.0, 0.0, steps_per_epoch=1)
    threat = he.ThreatModel(norm, 0.2)
    objective = objectives.get(name, threat, epsilon_schedule=zero, **EVERY[name])
    model = flat_model(objective)
    objective.build(SHAPE)
    x, y = (tf.constant(part[:BATCH_SIZE]) for part in examples())
    if name == "free_at":
        objective.noise.put_first_rows(tf.fill(x.shape, 0.1))
    np.testing.assert_allclose(objective.craft(model, x, y, step_number=5), x, atol=1e-30)


def test_training_at_radius_zero_is_clean_training():
    zero = schedules.Linear(0.0, 0.0, steps_per_epoch=1)
    clean, scheduled = (
        flat_model(objectives.Standard(THREAT)),
        flat_model(objectives.FreeAT(THREAT, num_replays=1, epsilon_schedule=zero)),
    )
    for model in (clean, scheduled):
        train(model, epochs=2)
    np.testing.assert_array_equal(clean.head.get_weights()[0], scheduled.head.get_weights()[0])


def test_without_schedule_the_sizes_are_the_full_ones_and_nothing_is_logged():
    for name, options in EVERY.items():
        objective = objectives.get(name, THREAT, **options)
        assert objective.sizes_at(3) == (THREAT, 1.0, None)
        assert objective.logs_at(3) == {}
    assert "epsilon" not in train(flat_model(objectives.FastAT(THREAT)))


def test_sizes_of_one_step():
    objective = objectives.PGDAT(THREAT, 3, 0.04, random_start=0.05, epsilon_schedule=SCHEDULE)
    sizes, ratio = objective.sizes_at(tf.constant(1, tf.int64)), 0.02 / (0.1 + 1e-6)
    assert float(sizes.threat.epsilon) == np.float32(0.02)
    assert float(sizes.step_size(0.04)) == pytest.approx(0.04 * ratio, rel=1e-6)
    assert float(sizes.random_start(0.05)) == pytest.approx(0.05 * ratio, rel=1e-6)
    assert (objective.attack.step_size, objective.attack.random_start) == (0.04, 0.05)
    for start in (True, False, "gaussian"):
        assert sizes.random_start(start) is start
    negative = objectives.NFGSM(THREAT, epsilon_schedule=schedules.Linear(-1, 0, steps_per_epoch=1))
    assert float(negative.sizes_at(0).threat.epsilon) == 0.0


def test_a_scheduled_start_is_uniform_within_its_radius():
    objective = objectives.PGDAT(THREAT, 1, 1e-9, random_start=0.05, epsilon_schedule=SCHEDULE)
    x, y = (tf.constant(part) for part in examples())
    x_adv = objective.craft(flat_model(objective), x, y, (1, 2), step_number=1)
    reference = THREAT.random_start(x, (1, 2), 0.05 * 0.02 / 0.1)
    np.testing.assert_allclose(x_adv, reference, atol=1e-6)


def test_a_step_size_schedule_replaces_the_scaling():
    steps = schedules.PiecewiseLinear([0, 10], [0.01, 0.02])
    for options in ({}, {"epsilon_schedule": SCHEDULE}):
        objective = objectives.PGDAT(THREAT, step_size_schedule=steps, **options)
        assert float(objective.sizes_at(5).step_size(0.5)) == pytest.approx(0.015)
        free = objectives.FreeAT(THREAT, step_size_schedule=steps, **options)
        assert float(free.sizes_at(10).step_size(free.step_size)) == pytest.approx(0.02)
    alone = objectives.PGDAT(THREAT, step_size_schedule=steps, random_start=0.05)
    sizes = alone.sizes_at(5)
    assert (sizes.threat, sizes.random_start(0.05), alone.logs_at(5)) == (THREAT, 0.05, {})
    backward = schedules.Linear(-0.1, 0.0, steps_per_epoch=1)
    sizes = objectives.PGDAT(THREAT, step_size_schedule=backward).sizes_at(0)
    assert float(sizes.step_size(0.5)) == 0.0


def test_evaluation_stays_at_the_nominal_radius():
    zero = schedules.Linear(0.0, 0.0, steps_per_epoch=1)
    threat = he.ThreatModel("linf", 0.5)
    plain, scheduled = (
        flat_model(objectives.PGDAT(threat, 2, epsilon_schedule=each), attack="pgd-5")
        for each in (None, zero)
    )
    x, y = examples()
    results = []
    for model in (plain, scheduled):
        model.compile(run_eagerly=True)
        results.append(model.evaluate(x, y, verbose=0, return_dict=True))
    assert results[0] == results[1]
    assert results[0]["robust_accuracy"] < results[0]["accuracy"]


@pytest.mark.parametrize("name", EVERY)
def test_configuration_is_plain_data_and_comes_back(name):
    steps = schedules.CycleLinear(0.01, 0.02, (3, 5), steps_per_epoch=2)
    options = {"epsilon_schedule": SCHEDULE, "step_size_schedule": steps, **EVERY[name]}
    objective = objectives.get(name, THREAT, **options)
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(objective)))
    restored = keras.saving.deserialize_keras_object(stored)
    assert restored.get_config() == objective.get_config()
    assert float(restored.sizes_at(1).threat.epsilon) == np.float32(RADII[1])
    # As written before there were schedules.
    old = objective.get_config()
    del old["epsilon_schedule"], old["step_size_schedule"]
    assert type(objective).from_config(old).epsilon_schedule is None


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("pgd_at", "float32"),
        *(
            pytest.param(name, "float32", marks=pytest.mark.slow)
            for name in EVERY
            if name != "pgd_at"
        ),
        # A radius is in float32 whatever the policy.
        pytest.param("pgd_at", "mixed_float16", marks=pytest.mark.slow),
        pytest.param("free_at", "mixed_bfloat16", marks=pytest.mark.slow),
    ],
)
def test_compiled_training_follows_eager_training(name, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        models = []
        for eagerly in (True, False):
            objective = objectives.get(name, THREAT, epsilon_schedule=SCHEDULE, **EVERY[name])
            models.append(flat_model(objective, "he"))
            history = train(models[-1], epochs=2, eagerly=eagerly)
            if policy != "mixed_float16":  # where an overflow is a step that does not count
                assert history["epsilon"][1] == pytest.approx(RADII[3])
    finally:
        keras.config.set_dtype_policy(before)
    weights = [model.head.get_weights()[0] for model in models]
    np.testing.assert_allclose(*weights, atol=1e-5)
    assert np.isfinite(weights[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pgd_at", "free_at", "fast_at"])
def test_two_replicas_have_the_radius_of_one_device(name):
    options = {**EVERY[name], "epsilon_schedule": SCHEDULE}
    if name == "pgd_at":
        options["random_start"] = False
    # Equal shares: the rows of a buffer belong to places in the batch.
    model = flat_model(objectives.get(name, THREAT, **options), "he")
    expected = train(model, epochs=4, count=4)
    with mirrored().scope():
        twin = flat_model(objectives.get(name, THREAT, **options), "he")
        history = train(twin, epochs=4, eagerly=False, count=4)
    np.testing.assert_allclose(history["epsilon"], expected["epsilon"], rtol=1e-6)
    np.testing.assert_allclose(twin.head.get_weights()[0], model.head.get_weights()[0], atol=1e-5)


def test_a_saved_model_goes_on_at_its_radius(tmp_path):
    objective = objectives.FreeAT(THREAT, num_replays=2, epsilon_schedule=SCHEDULE)
    model = flat_model(objective, "he")
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = he.load_model(tmp_path / "model.keras")
    x, y = examples()
    for each in (model, loaded):
        each.run_eagerly = True
        history = each.fit(x[:4], y[:4], batch_size=4, shuffle=False, verbose=0).history
        assert history["epsilon"] == [pytest.approx(0.05)]
    np.testing.assert_array_equal(model.head.get_weights(), loaded.head.get_weights())


def test_accumulated_gradients_count_batches_as_the_learning_rate_does():
    objective = objectives.NFGSM(THREAT, epsilon_schedule=SCHEDULE)
    history = train(flat_model(objective), epochs=2, gradient_accumulation_steps=2)
    np.testing.assert_allclose(history["epsilon"], [RADII[0], RADII[2]], atol=1e-8)


def test_one_radius_for_all_replays_of_a_batch():
    seen = []

    class Watched(objectives.FreeAT):
        def after_update(self, images, x_adv, gradient, step):
            seen.append(float(self.sizes_at(step.number).threat.epsilon))
            super().after_update(images, x_adv, gradient, step)

    schedule = schedules.Linear(0.01, 0.01, steps_per_epoch=1)
    train(flat_model(Watched(THREAT, num_replays=2, epsilon_schedule=schedule)))
    np.testing.assert_allclose(seen, [0.01, 0.01, 0.03, 0.03], rtol=1e-6)


def test_the_private_copy_leaves_the_threat_model_alone():
    copied = with_radius(THREAT, tf.constant(0.0))
    assert float(copied.epsilon) == 0.0 and THREAT.epsilon == EPSILON
    with pytest.raises(ValueError, match="epsilon must be positive"):
        he.ThreatModel("linf", 0.0)


@pytest.mark.parametrize(
    ("build_objective", "error", "message"),
    [
        (lambda: objectives.PGDAT(THREAT, epsilon_schedule=0.1), TypeError, "epsilon_schedule=0.1"),
        (
            lambda: objectives.FastAT(THREAT, step_size_schedule=lambda step: step),
            TypeError,
            "expected a keras.optimizers.schedules.LearningRateSchedule.*step_size_schedule=<",
        ),
        (
            lambda: objectives.Standard(epsilon_schedule=SCHEDULE),
            ValueError,
            "epsilon_schedule without an adversary.*received threat=None",
        ),
    ],
)
def test_wrong_schedules_are_refused(build_objective, error, message):
    with pytest.raises(error, match=message):
        build_objective()
