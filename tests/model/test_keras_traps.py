"""Traps of Keras 3 and TensorFlow for an adversarial training step, one test each."""

import copy
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

SHAPE = (8, 8, 1)
THREAT = he.ThreatModel("linf", 0.1)
OBJECTIVES = {
    "pgd_at": lambda: objectives.PGDAT(THREAT, num_steps=3),
    "alp": lambda: objectives.ALP(THREAT, num_steps=3),
    "trades": lambda: objectives.TRADES(THREAT, num_steps=3),
    "free_at": lambda: objectives.FreeAT(THREAT, num_replays=2),
    "fast_at": lambda: objectives.FastAT(THREAT),
}


def examples(count=6):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.0, 1.0, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_model(objective=None, first_layers=(), compiled=True, **options):
    inputs = hidden = keras.Input(SHAPE)
    for layer in first_layers:
        hidden = layer(hidden)
    hidden = keras.layers.Flatten()(hidden)
    hidden = keras.layers.BatchNormalization(name="batch_norm")(hidden)
    network = keras.Model(inputs, keras.layers.Dense(5, activation="relu")(hidden))
    objective = OBJECTIVES["pgd_at"]() if objective is None else objective
    model = he.HEAdversarialModel(network, he.CosineHead(3, scale=5.0), objective, None)
    if compiled:
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **options)
    return model


def fit(model, *data, **options):
    return model.fit(*(data or examples()), **{"shuffle": False, "verbose": 0, **options}).history


@pytest.mark.fast_cases("layer1")
@pytest.mark.parametrize("layer", [keras.layers.Resizing(8, 8), keras.layers.RandomFlip()])
def test_an_omitted_training_flag_means_inference(layer):
    """With such a layer upstream, Keras 3.15 calls batch norm in training mode without the flag."""
    model = build_model(first_layers=[layer])
    before = model.get_weights()
    images, labels = examples()
    outputs = [
        model(images),
        model.logits(images),
        model.head(model.features(images)),
        15.0 / 3 * model.cosines(images),
        model.predict(images, verbose=0),
        he.attacks.Victim(model).logits(images),
    ]
    model.evaluate(images, labels, verbose=0)
    for output in outputs:
        np.testing.assert_allclose(output, model(images, training=False), atol=1e-5)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    model(images, training=True)
    assert np.abs(model.network.get_layer("batch_norm").moving_mean).max() > 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_adversary_watches_no_weight(name, monkeypatch):
    """The tapes that differentiate by the images must not record the weights as well."""
    watched = []

    class RecordingTape(tf.GradientTape):
        def __exit__(self, *details):
            weights = {id(variable.value) for variable in model.trainable_variables}
            watched.append(sum(id(each) in weights for each in self.watched_variables()))
            return super().__exit__(*details)

    model = build_model(OBJECTIVES[name](), run_eagerly=True)
    monkeypatch.setattr(tf, "GradientTape", RecordingTape)
    fit(model)
    weights = len(model.trainable_variables)
    if name == "free_at":
        assert watched == [weights] * 2
    else:
        assert len(watched) > 1 and watched[-1] == weights and not any(watched[:-1])


def test_the_graph_does_not_grow_with_the_steps():
    """Keras runs the step without autograph: a Python loop would be unrolled, or an error."""

    def number_of_operations(num_steps):
        model = build_model(objectives.PGDAT(THREAT, num_steps))
        model.optimizer.build(model.trainable_variables)
        step = tf.function(lambda *batch: model.train_step(batch), autograph=False)
        graph = step.get_concrete_function(*map(tf.constant, examples())).graph
        return len(graph.as_graph_def().node) + sum(
            len(function.node_def) for function in graph.as_graph_def().library.function
        )

    assert number_of_operations(4) == number_of_operations(40)


def test_xla_is_off_unless_asked_for():
    assert build_model().jit_compile is False
    assert build_model(jit_compile=True).jit_compile is True
    assert build_model(jit_compile="auto", run_eagerly=True).jit_compile is False


def test_xla_is_refused_with_a_warning_where_it_cannot_work():
    """A perturbation buffer that grows has no static shape."""
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model = build_model(OBJECTIVES["free_at"](), jit_compile=True)
    assert model.jit_compile is False


@pytest.mark.slow
def test_xla_gives_the_same_step():
    """From the image itself: random starts are other draws under XLA."""
    objective = objectives.PGDAT(THREAT, num_steps=3, random_start=False)
    plain, compiled = build_model(objective), build_model(objective, jit_compile=True)
    compiled.set_weights(plain.get_weights())
    losses = [fit(model)["loss"][0] for model in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for weight, expected in zip(compiled.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


@pytest.mark.slow
def test_xla_evaluates_to_the_same_verdicts():
    """The attack cannot drop broken examples there; what counts as robust stays the same."""
    images, labels = examples(30)
    attack = he.attacks.PGD(THREAT, 5, random_start=False)
    results = []
    model = build_model(compiled=False)
    model.evaluation_attack = attack
    for jit_compile in (False, True):
        model.compile(jit_compile=jit_compile)
        results.append(model.evaluate(images, labels, verbose=0, return_dict=True))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert 0 < results[0]["robust_accuracy"] < results[0]["accuracy"]
    assert attack.stop_when_broken


def test_the_logged_loss_is_not_zero():
    """A custom step that feeds no tracked metric logs 0.0 at the end of the epoch."""
    model = build_model(objectives.Standard(), compiled=False)
    model.compile(optimizer=keras.optimizers.SGD(0.0))
    images, labels = examples()
    losses = model.objective.loss(model, images, labels, images, training=True)
    assert fit(model, batch_size=6)["loss"] == [pytest.approx(losses.numpy().mean(), rel=1e-5)]


def test_metrics_are_tracked_and_named_once():
    model = build_model(metrics=["sparse_categorical_accuracy"], run_eagerly=True)
    fit(model)
    names = [metric.name for metric in model.metrics]
    assert names[:4] == ["loss", "accuracy", "clean_accuracy", "robust_accuracy"]
    assert len(set(names)) == len(names)
    model.reset_metrics()
    assert all(not np.any(metric.variables) for metric in model.metrics)
    assert "robust_accuracy" not in model.get_metrics_result()


def test_the_custom_step_survives_reloading(tmp_path):
    """A reloaded wrapper must train by its objective, not by Keras's own step."""
    model = build_model(OBJECTIVES["trades"](), run_eagerly=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded).train_step is he.HEAdversarialModel.train_step
    assert sorted(fit(loaded)) == ["accuracy", "clean_accuracy", "loss"]


def test_the_exported_model_gives_the_same_scaled_logits(tmp_path):
    logging.getLogger("absl").setLevel(logging.ERROR)
    objective = he.objectives.Standard()  # no other trains after an augmentation
    model = build_model(objective, [keras.layers.RandomFlip()], run_eagerly=True)
    fit(model)
    model.export(tmp_path / "exported", verbose=False)
    images, _ = examples(3)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(images), model.predict(images, verbose=0), atol=1e-5)
    assert np.abs(loaded.serve(images)).max() > 1.0  # the scale is inside


@pytest.mark.slow
def test_a_network_that_builds_itself_late_can_train():
    for objective in (OBJECTIVES["pgd_at"](), OBJECTIVES["free_at"]()):
        network = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])
        model = he.HEAdversarialModel(network, he.CosineHead(3), objective)
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        history = fit(model, batch_size=4)
        assert np.isfinite(history["loss"]).all()
        assert model.built and len(model.get_weights()) == 3


def test_one_batch_at_a_time():
    model = build_model(OBJECTIVES["free_at"]())
    images, labels = examples()
    result = model.train_on_batch(images, labels, return_dict=True)
    assert sorted(result) == ["accuracy", "loss"]
    assert int(model.optimizer.iterations) == 2
    assert sorted(model.test_on_batch(images, labels, return_dict=True)) == ["accuracy", "loss"]
    assert model.predict_on_batch(images).shape == (6, 3)


def test_frozen_layers_stay_as_they_are():
    model = build_model()
    model.network.trainable = False
    model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    before = model.get_weights()
    fit(model)
    changed = [not np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)]
    assert changed == [weight.shape == (5, 3) for weight in before]


@pytest.mark.slow
def test_a_model_can_be_copied_after_training():
    """Tensors of the graph left on the model would make this fail."""
    model = build_model(OBJECTIVES["free_at"]())
    fit(model)
    twin = copy.deepcopy(model)
    fit(model)
    fit(twin)
    for weight, expected in zip(twin.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_compiling_again_starts_a_new_optimizer_with_the_same_weights():
    model = build_model(run_eagerly=True)
    fit(model)
    before = model.get_weights()
    model.compile(optimizer=keras.optimizers.Adam(1e-3), run_eagerly=True)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert int(model.optimizer.iterations) == 0
    assert np.isfinite(fit(model)["loss"]).all()


def test_labels_and_weights_may_be_columns():
    images, labels = examples()
    flat, columns = build_model(run_eagerly=True), build_model(run_eagerly=True)
    columns.set_weights(flat.get_weights())
    weights = np.linspace(0.5, 2.0, len(labels))
    fit(flat, images, labels, sample_weight=weights)
    fit(columns, images, labels[:, None], sample_weight=weights[:, None])
    for weight, expected in zip(columns.get_weights(), flat.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-6)


def test_the_summary_counts_network_and_head():
    lines = []
    build_model().summary(print_fn=lambda text, **_: lines.append(text))
    text = "\n".join(lines)
    assert "cosine_head" in text
    trained = 64 * 2 + 64 * 5 + 5 + 5 * 3
    assert f"Trainable params: {trained:,}" in text
