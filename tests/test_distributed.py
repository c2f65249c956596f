"""Two replicas, here two logical CPU devices, train as one device does with the same global batch.

Starts are deterministic and logits far from saturation, so that rounding flips no sign.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import resuming
import tensorflow as tf

import he_keras as he
from he_keras import objectives
from he_keras.callbacks import replica_state

pytestmark = pytest.mark.slow

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
BATCH_SIZE = 8
TOLERANCE = 1e-5


class FixedStartTRADES(objectives.TRADES):
    """Its adversary starts at a fixed offset, since the KL has no gradient at the image."""

    def craft(self, model, images, labels, seed=(0, 0)):
        offset = 0.02 * tf.sin(7.0 * tf.range(16, dtype=tf.float32))
        start = images + tf.reshape(offset, SHAPE)
        crafted = self.attack.ascend(he.attacks.Victim(model), images, labels, start).x_adv
        return tf.stop_gradient(self.threat.project(crafted, images))


def iterated(build):
    return build(THREAT, num_steps=3, step_size=0.04, random_start=False)


OBJECTIVES = {
    "standard": lambda: objectives.Standard(THREAT),
    "pgd_at": lambda: iterated(objectives.PGDAT),
    "alp": lambda: iterated(objectives.ALP),
    "trades": lambda: FixedStartTRADES(THREAT, num_steps=3, step_size=0.04),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=2),
    "mart": lambda: iterated(objectives.MART),
    "n_fgsm": lambda: objectives.NFGSM(THREAT, noise_ratio=0.0),
    "n_fgsm released": lambda: objectives.NFGSM(THREAT, noise_ratio=0.0, attack_training_mode=True),
    "fast_at": lambda: objectives.FastAT(THREAT, initialization="zero"),
    "fast_at previous": lambda: objectives.FastAT(THREAT, initialization="previous"),
    "fast_at released": lambda: objectives.FastAT(
        THREAT, initialization="zero", attack_training_mode=True
    ),
}


@pytest.fixture(autouse=True)
def single_precision_afterwards():
    """Sets the policy back itself; clearing the whole Keras session, as conftest would, is slow."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


@functools.cache
def mirrored():
    """One strategy for all tests.

    The default reduction is by collective operations, and those of a second strategy in the same
    process, such as another test file's, clash with those of the first.
    """
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)


def examples(count):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_network(batch_norm):
    # Not ReLU: where a single unit is active, the direction of the features is constant, and signs
    # of the gradient are those of rounding errors.
    dense = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    layers = [keras.Input(SHAPE), keras.layers.Flatten(), dense]
    if batch_norm:
        synchronized = batch_norm == "synchronized"
        layers.append(keras.layers.BatchNormalization(synchronized=synchronized))
    return keras.Sequential(layers)


def build_model(objective, strategy=None, batch_norm=None, **options):
    """Builds and compiles a model, in the scope of the strategy, with weights that are fixed."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        head = he.CosineHead(3, scale=4.0)
        model = he.HEAdversarialModel(build_network(batch_norm), head, OBJECTIVES[objective]())
        generator = np.random.default_rng(7)
        for variable in model.trainable_variables:
            variable.assign(generator.normal(0.0, 0.5, variable.shape))
        model.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), **options)
    return model


def both(objective, batch_norm=None, **options):
    """One device, which steps eagerly to save the tracing, and two replicas."""
    return [
        build_model(objective, None, batch_norm, run_eagerly=True, **options),
        build_model(objective, mirrored(), batch_norm, **options),
    ]


class StepLosses(keras.callbacks.Callback):
    """Keeps the logs of every step."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def train(model, count, epochs=1, weights=None, **options):
    images, labels = examples(count)
    parts = (images, labels) if weights is None else (images, labels, weights)
    data = tf.data.Dataset.from_tensor_slices(parts).batch(BATCH_SIZE)
    steps = StepLosses()
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=[steps], **options).history
    return history, steps.logs


def assert_equal_training(models, results):
    """Weights, per-step logs and epoch results agree."""
    (single_history, single_steps), (several_history, several_steps) = results
    for single, several in zip(single_steps, several_steps, strict=True):
        assert several == pytest.approx(single, rel=TOLERANCE, abs=1e-7)
    assert several_history.keys() == single_history.keys()
    for name, values in single_history.items():
        np.testing.assert_allclose(several_history[name], values, rtol=TOLERANCE, atol=1e-7)
    for weight, expected in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("objective", "batch_norm", "count"),
    [
        ("standard", "synchronized", 21),
        ("pgd_at", "synchronized", 21),
        ("alp", None, 21),
        ("trades", "synchronized", 21),
        # Its perturbations belong to a replica: only full batches give them the same rows.
        ("free_at", None, 16),
        ("fast_at", None, 21),
        ("mart", "synchronized", 21),
        ("n_fgsm", None, 21),
        ("n_fgsm released", "synchronized", 21),
        pytest.param("alp", "synchronized", 21, marks=pytest.mark.slow),
        pytest.param("free_at", "synchronized", 16, marks=pytest.mark.slow),
        pytest.param("fast_at", "synchronized", 21, marks=pytest.mark.slow),
        pytest.param("fast_at previous", "synchronized", 16, marks=pytest.mark.slow),
        pytest.param("fast_at released", "synchronized", 21, marks=pytest.mark.slow),
        # The second replica gets no row of the last batch.
        pytest.param("pgd_at", "synchronized", 17, marks=pytest.mark.slow),
        pytest.param("trades", None, 17, marks=pytest.mark.slow),
        pytest.param("free_at", None, 17, marks=pytest.mark.slow),
    ],
)
def test_two_replicas_train_as_one_device(objective, batch_norm, count):
    """Loss logged unscaled, gradients of the global mean, whatever each replica's share."""
    models = both(objective, batch_norm)
    before = models[0].get_weights()[0]
    results = [train(model, count, epochs=2) for model in models]
    assert_equal_training(models, results)
    assert np.abs(models[0].get_weights()[0] - before).max() > 1000 * TOLERANCE
    assert len(results[0][1]) == 2 * -(-count // BATCH_SIZE)


def test_an_empty_share_counts_for_nothing():
    """17 examples: the last batch has one row, and the second replica none of it."""
    models = both("fast_at")
    results = [train(model, 17) for model in models]
    assert_equal_training(models, results)


def test_sample_weights_metrics_and_evaluation_agree():
    weights = np.linspace(0.0, 2.0, 21).astype(np.float32)
    metrics = {
        "metrics": ["sparse_top_k_categorical_accuracy"],
        "weighted_metrics": ["sparse_categorical_accuracy"],
    }
    models = both("pgd_at", **metrics)
    histories = []
    for model in models:
        validation = tf.data.Dataset.from_tensor_slices(examples(21)).batch(BATCH_SIZE)
        histories.append(train(model, 21, weights=weights, validation_data=validation)[0])
    assert {"val_robust_accuracy", "val_loss", "sparse_categorical_accuracy"} <= set(histories[0])
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=TOLERANCE, atol=1e-7)


def test_gradients_are_accumulated_over_replicas():
    """Five batches at two to an update: the last one waits; the uneven one counts by its size."""
    options = {"learning_rate": 0.02, "momentum": 0.9, "gradient_accumulation_steps": 2}
    for build in (keras.optimizers.SGD, functools.partial(he.optimizers.SGD, weight_decay=0.1)):
        models = both("pgd_at", "synchronized")
        for model in models:
            with model.distribute_strategy.scope():
                model.compile(optimizer=build(**options), run_eagerly=model is models[0])
        results = [train(model, 37) for model in models]
        assert_equal_training(models, results)
        assert [int(model.optimizer.iterations) for model in models] == [2, 2]


def test_step_logs_are_those_of_the_whole_batch():
    """Metrics given to `compile` as well; the last batch is one row, on the first replica."""
    models = both("pgd_at", "synchronized", metrics=["sparse_categorical_crossentropy"])
    results = [train(model, 17) for model in models]
    assert_equal_training(models, results)
    assert "sparse_categorical_crossentropy" in results[0][1][0]


def test_replicas_agree_on_statistics_that_are_not_synchronised():
    """Each normalises by its own share; what is kept is the mean over the shares by their size."""
    model = build_model("standard", mirrored(), "plain")
    images, labels = examples(7)
    # The layers before it, with the weights that the step starts from.
    values = keras.Sequential(model.network.layers[:-1])(images).numpy()
    model.fit(images, labels, batch_size=7, shuffle=False, verbose=0)
    layer = model.network.layers[-1]
    means = np.stack([values[:4].mean(axis=0)] * 4 + [values[4:].mean(axis=0)] * 3)
    variances = np.stack([values[:4].var(axis=0)] * 4 + [values[4:].var(axis=0)] * 3)
    share = 1 - layer.momentum
    expected = (share * means.mean(axis=0), 1 - share + share * variances.mean(axis=0))
    for variable, each in zip((layer.moving_mean, layer.moving_variance), expected, strict=True):
        copies = [copy.numpy() for copy in mirrored().experimental_local_results(variable.value)]
        np.testing.assert_array_equal(*copies)
        np.testing.assert_allclose(copies[0], each, rtol=1e-4, atol=1e-6)


def test_replicas_have_their_own_perturbations(tmp_path):
    """Together they are what one device has, and a saved model holds them all."""
    strategy = mirrored()
    models = both("free_at")
    for model in models:
        train(model, 16)
    single = models[0].objective.state_arrays()["noise_0"]
    with strategy.scope():
        several = models[1].objective.state_arrays()
        assert sorted(several) == ["noise_0", "noise_1"]
        together = np.concatenate([several["noise_0"], several["noise_1"]])
        np.testing.assert_allclose(together, single, atol=TOLERANCE)
        models[1].save(tmp_path / "model.keras")
        restored = he.load_model(tmp_path / "model.keras").objective.state_arrays()
    for name, array in several.items():
        np.testing.assert_array_equal(restored[name], array)


def test_a_run_on_replicas_resumes_exactly(tmp_path):
    """In the middle of an epoch: running metrics and perturbations are each replica's own."""
    resuming.assert_resumes(lambda: build_model("free_at", mirrored(), "synchronized"), tmp_path)


def test_metrics_of_another_number_of_replicas_are_summed():
    stored = [np.array([3.0, 4.0, 5.0]), np.array([1.0, 2.0, 3.0])] * 4
    for model in both("pgd_at"):
        assert replica_state.assign_metrics(model, [np.float32(each) for each in stored])
        results = model.get_metrics_result()
        assert float(results["loss"]) == pytest.approx(2.0)
        assert not replica_state.assign_metrics(model, stored[:1])


def test_replicas_draw_different_starts():
    model = build_model("fast_at", mirrored())
    strategy = model.distribute_strategy
    seeds = strategy.experimental_local_results(strategy.run(model.step_seed))
    assert len({tuple(seed.numpy()) for seed in seeds}) == 2


@pytest.mark.parametrize("objective", ["pgd_at", "fast_at released"])
def test_an_empty_share_of_unsynchronised_batch_norm_is_refused(objective):
    """It would make the moving statistics NaN without a word."""
    model = build_model(objective, mirrored(), "plain")
    with pytest.raises(tf.errors.InvalidArgumentError, match="A replica got no example of this"):
        train(model, 17)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_the_first_batch_need_not_split_evenly():
    """Seven examples: four on one replica, three on the other, in training and in evaluation."""
    models = both("pgd_at", "synchronized")
    images, labels = examples(7)
    results = []
    for model in models:
        history = model.fit(images, labels, batch_size=7, epochs=2, shuffle=False, verbose=0)
        scores = model.evaluate(images, labels, batch_size=7, verbose=0, return_dict=True)
        results.append({**{name: each[-1] for name, each in history.history.items()}, **scores})
    assert results[1] == pytest.approx(results[0], rel=TOLERANCE)


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"jit_compile": True}])
def test_what_keras_cannot_do_on_replicas_is_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"replica; expected .*received {name}={value}"):
        build_model("pgd_at", mirrored(), **options)


def test_the_refusal_holds_outside_the_scope_of_the_strategy():
    model = build_model("pgd_at", mirrored())
    with pytest.raises(ValueError, match="more than one replica"):
        model.compile(optimizer="sgd", steps_per_execution=4)


def test_an_overflow_on_one_replica_skips_the_step_on_all():
    """Keras's loss scaling looks at the first replica only; the large weights are on the second."""
    keras.config.set_dtype_policy("mixed_float16")
    strategy = mirrored()
    model = build_model("standard", strategy)
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), 16.0)
        model.compile(optimizer=optimizer)
    before = model.get_weights()
    history, _ = train(model, 8, weights=np.repeat([1.0, 1e6], 4).astype(np.float32))
    assert np.isfinite(history["loss"]).all()
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert float(optimizer.dynamic_scale.numpy()) == 8.0
    train(model, 8)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-4


@pytest.mark.slow
def test_half_precision_trains_on_replicas():
    keras.config.set_dtype_policy("mixed_float16")
    models = [build_model("pgd_at", each) for each in (None, mirrored())]
    before = models[0].get_weights()[0]
    changes = []
    for model in models:
        train(model, 21, epochs=3)
        changes.append(model.get_weights()[0] - before)
    assert np.linalg.norm(changes[1] - changes[0]) < 0.05 * np.linalg.norm(changes[0])
