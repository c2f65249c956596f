"""Two replicas, here two logical CPU devices, train as one device does with the same global batch.

Starts are deterministic and logits far from saturation, so that rounding flips no sign.
"""

import functools

import keras
import numpy as np
import pytest
import resuming
import tensorflow as tf
from replicated_training import (
    BATCH_SIZE,
    TOLERANCE,
    assert_equal_training,
    both,
    build_model,
    examples,
    mirrored,
    train,
)

import he_keras as he
from he_keras.callbacks import replica_state

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("objective", "batch_norm", "count"),
    [
        ("standard", "synchronized", 21),
        ("pgd_at", "synchronized", 21),
        ("alp", "synchronized", 21),
        ("trades", "synchronized", 21),
        # Its perturbations belong to a replica: only full batches give them the same rows.
        ("free_at", "synchronized", 16),
        ("fast_at", "synchronized", 21),
        ("fast_at released", "synchronized", 21),
        ("mart", "synchronized", 21),
        ("n_fgsm", None, 21),
        ("n_fgsm released", "synchronized", 21),
        # The second replica gets no row of the last batch.
        ("pgd_at", "synchronized", 17),
        ("free_at", None, 17),
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


@pytest.mark.parametrize(
    ("build", "constraint"),
    [
        (functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1), None),
        (functools.partial(keras.optimizers.Nadam, 0.01), "unit_norm"),
        (functools.partial(keras.optimizers.SGD, 0.02, use_ema=True, ema_momentum=0.9), None),
        (functools.partial(keras.optimizers.SGD, 0.02, loss_scale_factor=1024.0), "unit_norm"),
        (functools.partial(he.optimizers.SGD, 0.02, weight_decay=0.1), "unit_norm"),
    ],
    ids=["adamw", "nadam", "ema", "scaled", "ours"],
)
def test_optimizers_update_as_on_one_device(build, constraint):
    """Keras's own update: decay, average of the weights, loss scale, constraints."""
    models = both("standard")
    for model in models:
        model.network.layers[-1].kernel.constraint = keras.constraints.get(constraint)
        with model.distribute_strategy.scope():
            model.compile(optimizer=build(), run_eagerly=model is models[0])
    before = models[0].get_weights()[0]
    assert_equal_training(models, [train(model, 21) for model in models])
    assert np.abs(models[0].get_weights()[0] - before).max() > 1e-3


@pytest.mark.parametrize("wrap", [lambda inner: inner, keras.optimizers.LossScaleOptimizer])
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("gradient_accumulation_steps", "a larger batch"),
        ("ema_overwrite_frequency", "WeightAveraging"),
    ],
)
def test_what_branches_inside_a_replica_is_refused(setting, remedy, wrap):
    model = build_model("pgd_at", mirrored())
    options = {setting: 2, "use_ema": setting.startswith("ema")}
    with model.distribute_strategy.scope():
        optimizer = wrap(keras.optimizers.SGD(0.02, **options))
        plain_data = keras.saving.serialize_keras_object(optimizer)
    for each in (optimizer, plain_data):
        with pytest.raises(ValueError, match=f"than one replica.*{remedy}.*received {setting}=2"):
            model.compile(optimizer=each)


def test_what_layers_add_to_the_loss_is_refused():
    """Nobody knows whether it is a sum over the replica's examples or their mean."""
    model = build_model("trades", mirrored())
    model.network.layers[-1].activity_regularizer = keras.regularizers.L2(0.01)
    with pytest.raises(ValueError, match="no activity regulariser and no add_loss on more than"):
        train(model, 8)


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


@pytest.mark.parametrize(("name", "value"), [("clipnorm", 1.0), ("gradient_accumulation_steps", 2)])
def test_the_refusal_holds_for_what_is_set_after_compiling(name, value):
    """On the optimizer, or by another optimizer in its place."""
    model = build_model("standard", mirrored())
    setattr(model.optimizer, name, value)
    with pytest.raises(ValueError, match=f"replica; expected .*received {name}={value}"):
        train(model, 8)
    with model.distribute_strategy.scope():
        model.optimizer = keras.optimizers.SGD(0.1, **{name: value})
    with pytest.raises(ValueError, match=f"received {name}={value}"):
        train(model, 8)


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
