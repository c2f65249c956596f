"""Our batch norm against Keras's: values, gradients, statistics, files, dtypes, replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicated_training import mirrored

from he_keras.layers.batch_norm import BatchNormalization, scale_and_shift

# Half precision: some units of its last place, at values around 5.
TOLERANCES = {"float32": 1e-5, "mixed_bfloat16": 0.06, "mixed_float16": 0.01, "float64": 1e-12}
SHAPE = (6, 3, 5, 4)


def drawn(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype("float32")


def twins(policy="float32", shape=SHAPE, **options):
    """Our layer and Keras's with the same weights, none of them at its initial value."""
    settings = {"momentum": 0.9, "epsilon": 1e-5, "dtype": policy, **options}
    layers = [BatchNormalization(**settings), keras.layers.BatchNormalization(**settings)]
    for layer in layers:
        layer.build(shape)
    rng = np.random.default_rng(1)
    weights = [rng.uniform(0.5, 1.5, each.shape) for each in layers[0].weights]
    for layer in layers:
        layer.set_weights(weights)
    return layers


def pass_through(layer, images, training):
    """Outputs, gradients of the inputs and of gamma and beta, and the statistics afterwards."""
    inputs = tf.cast(images, layer.compute_dtype)
    upstream = tf.cast(drawn(images.shape, seed=2), layer.compute_dtype)
    variables = [each.value for each in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, training=training)
        loss = tf.reduce_sum(tf.cast(outputs * upstream, tf.float64))
    gradients = tape.gradient(loss, [inputs, *variables])
    statistics = [each.numpy() for each in layer.non_trainable_variables]
    return [np.asarray(tf.cast(each, tf.float64)) for each in (outputs, *gradients, *statistics)]


@pytest.mark.parametrize("options", [{}, {"center": False}, {"scale": False}], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", TOLERANCES)
def test_values_gradients_and_statistics_are_those_of_keras(policy, training, options):
    ours, theirs = twins(policy, **options)
    results = [pass_through(layer, drawn(), training) for layer in (ours, theirs)]
    for mine, reference in zip(*results, strict=True):
        error = np.max(np.abs(mine - reference)) / max(1.0, np.max(np.abs(reference)))
        assert error <= TOLERANCES[policy]


@pytest.mark.parametrize("shape", [(8, 4), (2, 3, 3, 3, 4), (1, 2, 1, 4)], ids=str)
def test_inputs_of_any_rank_and_batches_of_one(shape):
    ours, theirs = twins(shape=shape)
    for mine, reference in zip(
        *(pass_through(layer, drawn(shape), True) for layer in (ours, theirs)), strict=True
    ):
        np.testing.assert_allclose(mine, reference, atol=1e-5, rtol=1e-5)


def test_a_mask_leaves_examples_out():
    ours, theirs = twins()
    mask = np.array(drawn(SHAPE[:3], seed=4) > 1.0)
    results = [layer(drawn(), training=True, mask=mask) for layer in (ours, theirs)]
    np.testing.assert_allclose(*results, atol=1e-5)
    assert np.max(np.abs(results[0] - ours(drawn(), training=True))) > 0.1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_gradient_of_the_gradient_is_that_of_keras(policy, training):
    results = []
    for layer in twins(policy):
        inputs = tf.cast(drawn(), layer.compute_dtype)
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                loss = tf.reduce_sum(tf.cast(layer(inputs, training=training), tf.float32) ** 3)
            slope = tf.cast(inner.gradient(loss, inputs), tf.float32)
            total = tf.reduce_sum(slope**2)
        sources = [inputs, *(each.value for each in layer.trainable_variables)]
        results.append([np.asarray(tf.cast(g, tf.float64)) for g in outer.gradient(total, sources)])
    # The gradient of beta is a sum of large terms that cancel: errors are relative to the largest.
    largest = max(np.max(np.abs(reference)) for reference in results[1])
    for mine, reference in zip(*results, strict=True):
        error = np.max(np.abs(mine - reference)) / largest
        assert error <= {"float32": 1e-5, "mixed_bfloat16": 0.02}[policy]


def test_the_training_step_is_one_kernel():
    layer = twins()[0]
    step = tf.function(lambda x: layer(x, training=True)).get_concrete_function(
        tf.TensorSpec(SHAPE)
    )
    kinds = [operation.type for operation in step.graph.get_operations()]
    assert kinds.count("FusedBatchNormV3") == 1
    assert not {"SquaredDifference", "BatchNormWithGlobalNormalization"} & set(kinds)


def model_with(layer):
    return keras.Sequential([keras.Input(SHAPE[1:]), keras.layers.Conv2D(4, 1), layer])


@pytest.mark.parametrize("ours_first", [True, False])
def test_weight_files_are_interchangeable_with_keras(tmp_path, ours_first):
    layers = twins() if ours_first else twins()[::-1]
    source, target = (model_with(layer) for layer in layers)
    for weight in source.weights:
        weight.assign(drawn(weight.shape, seed=5) ** 2)
    source.save_weights(tmp_path / "a.weights.h5")
    target.load_weights(tmp_path / "a.weights.h5")
    for saved, loaded in zip(source.weights, target.weights, strict=True):
        np.testing.assert_array_equal(saved.numpy(), loaded.numpy())


def test_a_model_file_brings_the_layer_back(tmp_path):
    model = model_with(twins()[0])
    model.save(tmp_path / "a.keras")
    loaded = keras.saving.load_model(tmp_path / "a.keras")
    assert type(loaded.layers[-1]) is BatchNormalization
    np.testing.assert_array_equal(model.predict(drawn(), verbose=0), loaded(drawn()))


def test_a_frozen_layer_uses_and_keeps_its_statistics():
    layer = twins()[0]
    layer.trainable = False
    before = [each.numpy() for each in layer.weights]
    frozen = layer(drawn(), training=True)
    np.testing.assert_array_equal(frozen, layer(drawn(), training=False))
    for old, new in zip(before, layer.weights, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


@pytest.mark.parametrize("synchronized", [True, False])
def test_statistics_over_two_replicas_when_synchronized(synchronized):
    """Two halves of one batch: the outputs are those of the whole batch, if synchronised."""
    strategy = mirrored()
    with strategy.scope():
        layer = BatchNormalization(synchronized=synchronized)
        layer.build(SHAPE)
    halves = np.split(drawn(), 2)

    @tf.function
    def normalized(images):
        return strategy.run(lambda x: layer(x, training=True), args=(images,))

    images = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(halves[context.replica_id_in_sync_group])
    )
    outputs = np.concatenate(strategy.experimental_local_results(normalized(images)))
    whole = BatchNormalization()(drawn(), training=True).numpy()
    assert np.allclose(outputs, whole, atol=1e-5) == synchronized


def test_scale_and_shift_in_half_precision_rounds_once():
    rng = np.random.default_rng(3)
    inputs = tf.cast(rng.normal(size=(2, 2, 2, 3)), tf.bfloat16)
    scale, shift = rng.uniform(1.0, 2.0, (2, 3)).astype("float32")
    exact = np.asarray(tf.cast(inputs, tf.float32)) * scale + shift
    rounded = np.asarray(tf.cast(tf.cast(exact, tf.bfloat16), tf.float32))
    ours = np.asarray(tf.cast(scale_and_shift(inputs, scale, shift), tf.float32))
    np.testing.assert_allclose(ours, rounded, rtol=2**-8)
    assert np.mean(ours == rounded) > 0.95


def test_keras_before_3_14_sets_no_renorm():
    """Every call ended with an AttributeError there; Python 3.10 has no newer Keras."""
    layer, images = BatchNormalization(), np.ones((2, 3, 3, 4), np.float32)
    expected = layer(images, training=False)
    vars(layer).pop("renorm", None)
    np.testing.assert_array_equal(layer(images, training=False), expected)
