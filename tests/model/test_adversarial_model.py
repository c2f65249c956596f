"""`HEAdversarialModel` behaves as Keras models do: data, metrics, errors, repeatability."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

SHAPE = (4, 4, 1)
CLASSES = 3
THREAT = he.ThreatModel("linf", 0.1)
OBJECTIVES = {
    "standard": lambda: objectives.Standard(THREAT),
    "pgd_at": lambda: objectives.PGDAT(THREAT, num_steps=2),
    "alp": lambda: objectives.ALP(THREAT, num_steps=2),
    "trades": lambda: objectives.TRADES(THREAT, num_steps=2),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=1),
    "fast_at": lambda: objectives.FastAT(THREAT),
}


def examples(count=13):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, CLASSES, count)


def build_network(regularizer=None, layer=None):
    layers = [keras.Input(SHAPE), keras.layers.Flatten()]
    layers += [] if layer is None else [layer]
    layers.append(keras.layers.Dense(6, activation="tanh", kernel_regularizer=regularizer))
    return keras.Sequential(layers)


def build_model(
    objective="pgd_at", head=None, network=None, compiled=True, evaluation_attack="pgd-2", **options
):
    """Builds a model whose weights do not depend on what was built before.

    It steps eagerly, which is faster for a few small batches, unless it is compiled again.
    """
    network = build_network() if network is None else network
    head = he.CosineHead(CLASSES, scale=5.0) if head is None else head
    given = (network, head, OBJECTIVES[objective](), evaluation_attack)
    model = he.HEAdversarialModel(*given, **options)
    generator = np.random.default_rng(7)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(0.0, 0.5, variable.shape))
    if compiled:
        compile_model(model, run_eagerly=True)
    return model


def compile_model(model, rate=0.1, momentum=0.9, **options):
    model.compile(optimizer=keras.optimizers.SGD(rate, momentum=momentum), **options)
    return model


def graph_model(objective="pgd_at", **options):
    return compile_model(build_model(objective, compiled=False, **options))


def fit(model, *data, **options):
    options = {"batch_size": 5, "shuffle": False, "verbose": 0, **options}
    return model.fit(*(data or examples()), **options).history


def assert_same_weights(model, other, **tolerances):
    pairs = list(zip(model.get_weights(), other.get_weights(), strict=True))
    assert pairs
    for weight, expected in pairs:
        np.testing.assert_allclose(weight, expected, **{"rtol": 0, "atol": 0, **tolerances})


@pytest.mark.fast_cases("pgd_at-reported1", "free_at-reported3")
@pytest.mark.parametrize(
    ("objective", "reported"),
    [
        ("standard", ["accuracy", "clean_accuracy", "loss"]),
        ("pgd_at", ["accuracy", "loss"]),
        ("trades", ["accuracy", "clean_accuracy", "loss"]),
        ("free_at", ["accuracy", "loss"]),
    ],
)
def test_reported_metrics(objective, reported):
    build = graph_model if objective == "pgd_at" else build_model
    history = fit(build(objective), validation_data=examples(), epochs=2)
    validation = ["val_accuracy", "val_loss", "val_robust_accuracy"]
    assert sorted(history) == sorted(reported + validation)
    assert all(len(values) == 2 and np.isfinite(values).all() for values in history.values())
    assert history["val_robust_accuracy"][-1] <= history["val_accuracy"][-1]


@pytest.mark.slow
def test_numpy_and_tf_data_give_the_same_weights():
    images, labels = examples()
    from_numpy, from_data = build_model(), graph_model()
    fit(from_numpy)
    data = tf.data.Dataset.from_tensor_slices((images, labels[:, None])).batch(5)
    from_data.fit(data, verbose=0)  # with labels of shape (n, 1)
    assert_same_weights(from_numpy, from_data, atol=1e-6)
    result = from_numpy.evaluate(images, labels, batch_size=5, verbose=0, return_dict=True)
    assert from_data.evaluate(data, verbose=0, return_dict=True) == pytest.approx(result, abs=1e-6)
    predicted = from_numpy.predict(images, verbose=0)
    np.testing.assert_allclose(predicted, from_data.predict(data, verbose=0), atol=1e-5)
    np.testing.assert_allclose(predicted, from_numpy(images), atol=1e-5)


def test_class_weight_is_a_sample_weight():
    images, labels = examples()
    by_class, by_sample = build_model(), build_model()
    weights = {0: 0.5, 1: 2.0, 2: 0.0}
    first = fit(by_class, class_weight=weights)
    second = fit(by_sample, sample_weight=np.array([weights[label] for label in labels]))
    assert_same_weights(by_class, by_sample, atol=1e-6)
    assert first["loss"] == pytest.approx(second["loss"])
    unweighted = build_model()
    fit(unweighted)
    assert np.abs(unweighted.get_weights()[0] - by_class.get_weights()[0]).max() > 1e-3


def test_evaluation_weighs_the_loss_but_not_the_accuracies():
    images, labels = examples()
    model = build_model()
    weights = np.linspace(0.0, 2.0, len(images))
    logits = model.predict(images, verbose=0).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    losses = -log_p[np.arange(len(labels)), labels]
    result = model.evaluate(images, labels, 5, 0, sample_weight=weights, return_dict=True)
    assert result["loss"] == pytest.approx(np.mean(weights * losses), rel=1e-5)
    assert result["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == labels))


def test_accuracy_is_that_of_the_examples_trained_on():
    images, labels = examples(8)
    model = compile_model(build_model("trades"), rate=0.0, run_eagerly=True)
    x_adv = model.objective.craft(model, tf.constant(images), tf.constant(labels), (0, 0))
    history = fit(model, images, labels, batch_size=8)
    for name, inputs in (("accuracy", x_adv), ("clean_accuracy", images)):
        right = model.predict(inputs, verbose=0).argmax(axis=1) == labels
        assert history[name] == [pytest.approx(right.mean())]


def test_compiled_metrics_see_logits_labels_and_weights():
    images, labels = examples()
    entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    model = compile_model(
        build_model("standard"),
        rate=0.0,
        run_eagerly=True,
        metrics=["accuracy", entropy],
        weighted_metrics=["sparse_categorical_accuracy"],
    )
    weights = np.linspace(0.1, 2.0, len(images))
    history = fit(model, sample_weight=weights, validation_data=(images, labels, weights))
    right = model.predict(images, verbose=0).argmax(axis=1) == labels
    assert history["accuracy"] == [pytest.approx(right.mean())]
    for prefix in ("", "val_"):
        weighted = history[f"{prefix}sparse_categorical_accuracy"]
        assert weighted == [pytest.approx(np.average(right, weights=weights))]
    result = model.evaluate(images, labels, verbose=0, return_dict=True)
    assert result["entropy"] == pytest.approx(result["loss"], rel=1e-5)


def test_metrics_start_anew_in_every_epoch():
    model = compile_model(build_model("standard"), rate=0.0, run_eagerly=True)
    history = fit(model, epochs=3)
    np.testing.assert_allclose(history["loss"], history["loss"][0], rtol=1e-6)


def test_callbacks_see_the_metrics_and_can_stop():
    seen = []

    class Stopping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(sorted(logs))

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = logs["val_robust_accuracy"] <= 1.0

    history = fit(build_model(), validation_data=examples(), epochs=4, callbacks=[Stopping()])
    assert len(history["loss"]) == 1
    assert seen == [["accuracy", "loss"]] * 3


def test_several_steps_per_execution_change_nothing():
    single = graph_model()
    several = compile_model(build_model(compiled=False), steps_per_execution=2)
    first, second = fit(single), fit(several)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert_same_weights(single, several, atol=1e-6)


@pytest.mark.fast_cases("free_at")
@pytest.mark.parametrize("objective", ["pgd_at", "free_at"])
def test_eager_and_graph_steps_are_equal(objective):
    graph, eager = graph_model(objective), build_model(objective)
    first, second = fit(graph), fit(eager)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert_same_weights(graph, eager, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "calls"),
    [
        ("pgd_at", 2),
        ("trades", 4),
        ("free_at", 1),
        pytest.param("standard", 1, marks=pytest.mark.slow),
        pytest.param("alp", 3, marks=pytest.mark.slow),
        pytest.param("fast_at", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_fitted", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_step_is_traced_once(objective, calls, is_fitted):
    """Also without `fit`, where the optimizer's variables were made while the step was traced.

    Python calls the network as often as the step names it, for any number of batches.

    The last batch is shorter, and the loop of the adversary has two steps.
    """

    class TraceCounter(keras.layers.Layer):
        calls = 0

        def call(self, inputs):
            TraceCounter.calls += 1
            return inputs

    model = graph_model(objective, network=build_network(layer=TraceCounter()))
    TraceCounter.calls = 0
    if is_fitted:
        fit(model, epochs=2)
    else:
        data = tf.data.Dataset.from_tensor_slices(examples(22)).batch(8)
        model.make_train_function()
        model.train_function(iter(data))
    assert TraceCounter.calls == calls
    fit(model, *examples(22))
    assert TraceCounter.calls == calls


def test_two_runs_are_equal_bit_for_bit_and_seeds_differ():
    first, second, other = graph_model(), graph_model(), graph_model(seed=1)
    for model in (first, second, other):
        fit(model, epochs=2)
    assert_same_weights(first, second)
    assert np.abs(first.get_weights()[0] - other.get_weights()[0]).max() > 0


def test_two_batches_draw_different_noise():
    images, labels = examples(5)
    model = compile_model(build_model("fast_at"), rate=0.0, run_eagerly=True)
    seeds = []
    for _ in range(2):
        seeds.append(model.step_seed().numpy())
        model.fit(images, labels, verbose=0)
    assert seeds[0][0] == seeds[1][0] and seeds[0][1] != seeds[1][1]
    drawn = [model.objective.craft(model, tf.constant(images), labels, seed) for seed in seeds]
    assert np.abs(drawn[0] - drawn[1]).max() > 0.01


def test_evaluation_depends_neither_on_batches_nor_on_earlier_ones():
    """The attack hardly moves from its random start: its verdicts are those of the draws."""
    images, labels = examples(60)
    attack = he.attacks.PGD(he.ThreatModel("linf", 1.0), 1, step_size=1e-3)
    model = graph_model(evaluation_attack=attack)
    results = [
        model.evaluate(images, labels, batch_size=size, verbose=0, return_dict=True)
        for size in (60, 7, 1, 60)
    ]
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)
    assert results[0] == results[3]
    assert 0 < results[0]["robust_accuracy"] < results[0]["accuracy"]


def test_evaluation_attack_can_be_chosen():
    images, labels = examples(40)
    model = build_model(evaluation_attack=None)
    assert "robust_accuracy" not in model.evaluate(images, labels, verbose=0, return_dict=True)
    assert build_model(evaluation_attack="pgd-7", seed=5).evaluation_attack.num_steps == 7
    assert build_model(evaluation_attack="pgd-7", seed=5).evaluation_attack.seed == 5
    attack = he.attacks.PGD(he.ThreatModel("linf", 0.4), 10, random_start=False)
    model = build_model(evaluation_attack=attack)
    result = model.evaluate(images, labels, verbose=0, return_dict=True)
    direct = attack(model, images, labels)
    assert result["robust_accuracy"] == pytest.approx(direct.robust_accuracy)


def test_default_evaluation_ignores_the_scale():
    """On the margin, a large scale cannot hide the gradient as it does from the cross-entropy."""
    attack = build_model(evaluation_attack="default").evaluation_attack
    assert (attack.loss, attack.num_steps, attack.threat) == ("cw", 20, THREAT)
    keras.utils.set_random_seed(0)
    clean = he.HEAdversarialModel(build_network(), keras.layers.Dense(3), objectives.Standard())
    assert clean.evaluation_attack is None


@pytest.mark.fast_cases("pgd_at", "free_at")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_regularisers_enter_the_gradient(objective):
    """The step differs from one without regulariser by exactly -learning_rate * 2 * factor * W."""
    images, labels = examples()
    factor, rate = 0.05, 0.1
    weights = []
    for regularizer in (None, keras.regularizers.L2(factor)):
        network = build_network(regularizer)
        model = compile_model(
            build_model(objective, network=network), rate, momentum=0.0, run_eagerly=True
        )
        start = model.get_weights()
        history = fit(model, images, labels, batch_size=13)
        weights.append((model.get_weights(), history["loss"][0]))
    (plain, plain_loss), (decayed, decayed_loss) = weights
    np.testing.assert_allclose(decayed[0] - plain[0], -rate * 2 * factor * start[0], atol=1e-6)
    np.testing.assert_allclose(decayed[2], plain[2], atol=1e-6)  # the head has no regulariser
    penalty = factor * np.sum(start[0] ** 2)
    assert decayed_loss - plain_loss == pytest.approx(penalty, rel=1e-4)


def test_activity_regularisers_count_too():
    layer = keras.layers.ActivityRegularization(l2=0.1)
    model = build_model(network=build_network(layer=layer))
    plain = build_model()
    assert fit(model)["loss"][0] > fit(plain)["loss"][0] + 0.1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros((4, *SHAPE), np.uint8), np.zeros(4, int)), "dtype uint8"),
        ((np.zeros((4, *SHAPE), np.float32), np.eye(3)[[0, 1, 2, 0]]), "argmax"),
        ((np.zeros((4, *SHAPE), np.float32), None), "received images only"),
    ],
)
def test_wrong_batches_are_refused(data, message):
    model = build_model()
    with pytest.raises(ValueError, match=f"expected .*{message}|{message}"):
        model.fit(*data, verbose=0)
    with pytest.raises(ValueError, match=message):
        model.evaluate(*data, verbose=0)


@pytest.mark.fast_cases("255.0", "nan")
@pytest.mark.parametrize("value", [255.0, -0.01, np.nan])
def test_images_outside_the_bounds_are_refused_while_training(value):
    images, labels = examples()
    images[3, 1, 2, 0] = value
    model = graph_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match="outside the bounds of the threat model"):
        fit(model, images, labels, batch_size=13)
    stream = tf.data.Dataset.from_tensor_slices((images, labels)).batch(13)
    with pytest.raises(ValueError, match=r"Images outside the bounds .* received values in \["):
        model.fit(stream, verbose=0)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_predicting_integers_is_refused():
    with pytest.raises(ValueError, match=r"expected e.g. images / 255.0 .*received dtype uint8"):
        build_model().predict(np.zeros((4, *SHAPE), np.uint8), verbose=0)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: build_model().compile(loss="mse"), ValueError, "objective=.*received loss='mse'"),
        (lambda: build_model(seed=-1), ValueError, "seed=-1"),
        (lambda: build_model(evaluation_attack="pgb-20"), ValueError, "pgb-20"),
        (lambda: build_model(head=lambda z: z), TypeError, "Invalid head; expected"),
        (lambda: he.HEAdversarialModel(None, he.CosineHead(3)), TypeError, "Invalid network"),
        (
            lambda: he.HEAdversarialModel(build_network(), he.CosineHead(3), "pgd"),
            TypeError,
            "objective='pgd'",
        ),
        (
            lambda: he.HEAdversarialModel(build_network(), he.CosineHead(3), None, "pgd-20"),
            ValueError,
            "needs a threat model; expected .*'pgd-20'",
        ),
        (
            lambda: build_model(
                network=keras.Sequential([keras.Input(SHAPE), keras.layers.ReLU()])
            ),
            ValueError,
            "pooling or Flatten; received output shape",
        ),
        (lambda: build_model(head=keras.layers.Dense(3)).cosines(1), ValueError, "received head=D"),
    ],
)
def test_bad_parts_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
