"""What one training step adds up, draws and checks, whatever the objective and the compiler."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras import objectives

SHAPE = (4, 4, 1)
THREAT = he.ThreatModel("linf", 0.1)
FACTOR = 0.25
#: How many passes train in one update, for each objective.
TRAINING_PASSES = {
    "alp": 2,
    "awp": 1,
    "elle": 2,
    "fast_adv_plus": 1,
    "fast_at": 1,
    "free_at": 1,
    "grad_align": 3,
    "llr": 1,
    "mart": 2,
    "n_fgsm": 1,
    "pgd_at": 1,
    "rat": 2,
    "standard": 1,
    "trades": 2,
}
#: And how many passes in training mode do not: AWP's proxy, LLR's search.
OTHER_PASSES = {"awp": 1, "llr": 1}
#: Adversaries whose steps are no passes in training mode: two of them show as much as ten.
FEW_STEPS = {name: {"num_steps": 2} for name in ("alp", "llr", "mart", "pgd_at", "trades")}


class Activity(keras.layers.Layer):
    """Adds its input to the loss, and remembers what it added in passes in training mode."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.autocast = False
        self.seen = []

    def call(self, inputs, training=False):
        added = FACTOR * keras.ops.sum(inputs)
        self.add_loss(added)
        if training:
            self.seen.append(float(added))
        return inputs


def examples(count=4):
    generator = np.random.default_rng(0)
    images = generator.uniform(0.2, 0.8, (count, *SHAPE)).astype(np.float32)
    return images, generator.integers(0, 3, count)


def build_model(objective, *layers, rate=0.0, **options):
    keras.utils.set_random_seed(3)
    stack = [keras.Input(SHAPE), keras.layers.Flatten(), *layers, keras.layers.Dense(5, "tanh")]
    head = he.CosineHead(3, scale=4.0)
    model = he.HEAdversarialModel(keras.Sequential(stack), head, objective, None, seed=5)
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=options.pop("every", None))
    model.compile(optimizer=optimizer, **options)
    return model


def fit(model, images, labels, **options):
    settings = {"batch_size": len(images), "shuffle": False, "verbose": 0, **options}
    return model.fit(images, labels, **settings).history


# Activity regularisers


def test_every_objective_is_in_the_table():
    assert sorted(TRAINING_PASSES) == objectives.names()


@pytest.mark.fast_cases("alp", "free_at", "rat", "trades")
@pytest.mark.parametrize("name", TRAINING_PASSES)
def test_activity_counts_once_in_each_pass_that_trains(name):
    # The gradient of an activity moves FreeAT's perturbation too, from the second replay on.
    options = {"num_replays": 1} if name == "free_at" else FEW_STEPS.get(name, {})
    losses, activity = [], Activity()
    for layers in ([], [activity]):
        model = build_model(objectives.get(name, THREAT, **options), *layers, run_eagerly=True)
        activity.seen.clear()
        losses.append(fit(model, *examples())["loss"][0])
    others = OTHER_PASSES.get(name, 0)
    assert len(activity.seen) == TRAINING_PASSES[name] + others
    assert losses[1] - losses[0] == pytest.approx(sum(activity.seen[others:]), rel=1e-3)


def test_further_passes_of_the_released_rat_add_nothing():
    activity = Activity()
    model = build_model(objectives.RAT(THREAT, repeat_passes=True), activity, run_eagerly=True)
    activity.seen.clear()
    loss = fit(model, *examples())["loss"][0]
    plain = build_model(objectives.RAT(THREAT, repeat_passes=True), run_eagerly=True)
    assert len(activity.seen) == 8
    added = loss - fit(plain, *examples())["loss"][0]
    assert added == pytest.approx(sum(activity.seen[:2]), rel=1e-3)


class OwnCall(he.HEAdversarialModel):
    """A subclass that prepares the images itself, and adds a loss itself."""

    def call(self, inputs, training=None):
        self.add_loss(keras.ops.convert_to_tensor(2.0))
        return self.head(self.network(2.0 * inputs - 1.0, training=training))


def test_what_a_subclass_adds_counts_too():
    losses = []
    for layers in ([], [Activity()]):
        network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten(), *layers])
        keras.utils.set_random_seed(3)
        model = OwnCall(network, he.CosineHead(3, scale=4.0), objectives.TRADES(THREAT, 1.0), None)
        model.compile(optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
        images, labels = examples()
        losses.append(fit(model, images, labels)["loss"][0])
        images, labels = tf.constant(images), tf.constant(labels, tf.int32)
        x_adv = model.objective.craft(model, images, labels, seed=(0, 0))
        without = model.objective.loss(model, images, labels, x_adv).numpy().mean()
        seen = layers[0].seen[:2] if layers else [0.0]
        assert losses[-1] == pytest.approx(without + 2 * 2.0 + sum(seen), rel=1e-3)


def test_rat_refuses_a_call_that_it_would_leave_out():
    """It would train on other images than are attacked and predicted."""
    network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()])
    model = OwnCall(network, he.CosineHead(3), objectives.get("rat", THREAT), None)
    model.compile(optimizer="sgd")
    with pytest.raises(ValueError, match="override `features` instead; received OwnCall.call"):
        fit(model, *examples())


def test_activity_of_the_head_and_of_weights_in_closed_form():
    """Two passes over logits, one over weights."""
    objective = objectives.TRADES(THREAT, num_steps=1, random_start=0.05)
    model = build_model(objective, run_eagerly=True)
    images, labels = map(tf.constant, examples())
    x_adv = objective.craft(model, images, labels, (5, 0))
    weights = model.network.layers[-1].kernel
    plain = float(tf.reduce_mean(objective.loss(model, images, labels, x_adv)))
    model.head.activity_regularizer = keras.regularizers.L2(0.01)
    weights.regularizer = keras.regularizers.L2(0.5)
    expected = plain + 0.5 * float(tf.reduce_sum(tf.square(weights.value)))
    for each in (images, x_adv):
        # Keras 3.12 takes the sum over the examples, later ones their mean.
        model(each)
        expected += float(model.head.losses[0])
    assert fit(model, images, labels)["loss"][0] == pytest.approx(expected, rel=1e-5)


# Random draws


def test_batches_of_one_update_draw_different_noise():
    """Seen through the perturbations of two equal batches."""
    seen = []

    class Watched(objectives.FastAT):
        def craft(self, model, images, labels, seed=(0, 0)):
            seen.append(np.array(seed))
            return super().craft(model, images, labels, seed)

    model = build_model(Watched(THREAT), every=2, run_eagerly=True, rate=0.1)
    images, labels = examples(12)
    fit(model, images, labels, batch_size=4)
    assert [each.tolist() for each in seen] == [[5, 0], [5, 1], [5, 2]]
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("name", ["elle", "grad_align"])
def test_the_loss_is_a_function_of_its_arguments(name):
    """Of a model without an optimizer too; the seed is one of them."""
    objective = objectives.get(name, THREAT)
    keras.utils.set_random_seed(3)
    network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()])
    model = he.HEAdversarialModel(network, he.CosineHead(3, scale=4.0), objective)
    images, labels = map(tf.constant, examples())

    def losses(**seed):
        return objective.loss(model, images, labels, images, **seed).numpy()

    np.testing.assert_array_equal(losses(), losses(seed=(0, 0)))
    assert np.abs(losses() - losses(seed=(0, 1))).max() > 1e-6


@pytest.mark.parametrize("name", ["elle", "grad_align"])
def test_training_draws_the_penalty_from_the_seed_of_its_batch(name):
    """Inside AWP too, which passes the seed on."""
    images, labels = examples()
    for options in ({"name": name}, {"name": "awp", "base": name, "gamma": 0.0}):
        objective = objectives.get(options.pop("name"), THREAT, **options)
        model = build_model(objective, run_eagerly=True)
        x_adv = objective.craft(model, tf.constant(images), tf.constant(labels), (5, 0))
        expected = objective.loss(model, tf.constant(images), labels, x_adv, seed=(5, 0))
        assert fit(model, images, labels)["loss"][0] == pytest.approx(expected.numpy().mean(), 1e-4)


# Checks of a batch


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_images_outside_the_bounds_stop_a_compiled_step(jit_compile, call):
    """XLA drops assertions; no weight may have changed when the error comes."""
    model = build_model(objectives.Standard(THREAT), rate=0.1, jit_compile=jit_compile)
    images, labels = examples()
    images[2, 0, 0] = 1.5
    before = model.get_weights()
    expected = ValueError if call == "fit" else tf.errors.InvalidArgumentError
    with pytest.raises(expected, match="outside the bounds of the threat"):
        getattr(model, call)(images, labels)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert model.jit_compile == jit_compile


@pytest.mark.parametrize("jit_compile", [False, True])
def test_labels_that_are_no_class_stop_a_compiled_step(jit_compile):
    """Without a word, XLA would make the weights NaN, and 1.5 would count as class 1."""
    model = build_model(objectives.Standard(THREAT), rate=0.1, jit_compile=jit_compile)
    images, labels = examples()
    labels = labels.astype(np.float32)
    before = model.get_weights()
    for labels[1], message in (
        (3, "Label outside the classes; expected 0..2"),
        (-1, "Label outside"),
        (1.5, "whole numbers"),
    ):
        for call in (model.train_on_batch, model.test_on_batch):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                call(images, labels)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_weights_that_are_none_stop_a_compiled_step(jit_compile):
    """A negative one would ascend the loss, and the others would make all weights NaN."""
    model = build_model(objectives.Standard(THREAT), rate=0.1, jit_compile=jit_compile)
    images, labels = examples()
    before = model.get_weights()
    for weight in (-1.0, np.nan, np.inf):
        weights = np.array([1, 0, weight, 2], "float32")
        with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid sample weights; expect"):
            model.train_on_batch(images, labels, sample_weight=weights)
    for kept, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(kept, expected)


def test_the_classes_of_a_head_of_ones_own_are_counted():
    """Also where the network is built by the first batch."""

    class Head(keras.layers.Layer):
        def build(self, features):
            self.kernel = self.add_weight(shape=(features[-1], 3))

        def call(self, features):
            return features @ self.kernel

    network = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])
    model = he.HEAdversarialModel(network, Head(), evaluation_attack=None)
    model.compile("sgd", run_eagerly=True)
    images, labels = examples()
    model.train_on_batch(images, labels)
    assert model.num_classes == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected 0..2"):
        model.train_on_batch(images, labels + 3)


def test_a_program_without_assertions_makes_the_loss_nan():
    """As on a TPU, which compiles everything."""
    images, labels = examples()

    @tf.function(jit_compile=True)
    def checked(images):
        return objectives.training_batch.unpack((images, labels), THREAT)[0]

    np.testing.assert_array_equal(checked(images), images)
    assert np.isnan(checked(images + 1.0)).all()


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_xla_trains_as_the_graph_does(jit_compile):
    """What is compiled is the step after the checks, and it is the same step."""
    objective = objectives.PGDAT(THREAT, num_steps=2, random_start=False)
    model = build_model(objective, rate=0.1, jit_compile=jit_compile)
    eager = build_model(objective, rate=0.1, run_eagerly=True)
    for each in (model, eager):
        fit(each, *examples(6), batch_size=4, sample_weight=np.linspace(0.5, 1.5, 6))
    for weight, expected in zip(model.get_weights(), eager.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


# Plain functions


@pytest.mark.parametrize("name", objectives.names())
def test_crafting_and_loss_need_no_compiled_model(name):
    """They are functions of their arguments: the same seed gives the same numbers."""
    objective = objectives.get(name, THREAT, **FEW_STEPS.get(name, {}))
    layers = [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(5, "tanh")]
    model = he.HEAdversarialModel(keras.Sequential(layers), he.CosineHead(3), objective)
    images, labels = map(tf.constant, examples())
    crafted = [objective.craft(model, images, labels, (5, 1)) for _ in range(2)]
    np.testing.assert_array_equal(*crafted)
    losses = [objective.loss(model, images, labels, crafted[0], seed=(5, 1)) for _ in range(2)]
    np.testing.assert_array_equal(*losses)
    assert losses[0].shape == labels.shape and np.isfinite(losses[0]).all()


@pytest.mark.parametrize("name", ["elle", "grad_align"])
def test_penalties_draw_within_the_radius_of_the_step(name):
    """At radius 0 all their points are the image."""
    growing = keras.optimizers.schedules.PolynomialDecay(0.0, 10, end_learning_rate=0.1)
    objective = objectives.get(name, THREAT, penalty_weight=1.0, epsilon_schedule=growing)
    model = build_model(objective)
    images, labels = map(tf.constant, examples())
    plain = objectives.FastAT(THREAT).loss(model, images, labels, images)
    penalties = [
        objective.forward_in_step(
            model, images, labels, images, objectives.TrainingStep((5, 1), step)
        ).losses
        - plain
        for step in (0, 10)
    ]
    np.testing.assert_allclose(penalties[0], tf.zeros_like(plain), atol=1e-6)
    assert np.abs(penalties[1]).max() > np.abs(penalties[0]).max()


# Schedules


@pytest.mark.parametrize("has_radius", [False, True])
def test_a_recovering_adversary_never_steps_beyond_the_radius(has_radius):
    """FastAdv+'s schedule is that of the single step, which may be longer."""
    steps = keras.optimizers.schedules.PolynomialDecay(0.125, 10, end_learning_rate=0.2)
    radii = keras.optimizers.schedules.PolynomialDecay(0.05, 10, end_learning_rate=0.1)
    options = {"epsilon_schedule": radii} if has_radius else {}
    objective = objectives.FastAdvPlus(THREAT, step_size_schedule=steps, **options)
    for step in (0, 5, 10):
        radius = float(radii(step)) if has_radius else 0.1
        single_step = objective.sizes_at(step).step_size(objective.attack.step_size)
        assert float(single_step) == pytest.approx(float(steps(step)))
        sizes = objective.recovery_sizes_at(step)
        recovering_step = sizes.step_size(objective.recovery_attack.step_size)
        assert float(recovering_step) == pytest.approx(0.25 * radius)
        assert float(sizes.threat.epsilon) == pytest.approx(radius)
    assert objective.recovery_attack.step_size == pytest.approx(0.025)


def test_free_at_says_how_often_a_batch_updates_the_weights():
    model = build_model(objectives.FreeAT(THREAT), run_eagerly=True)
    fit(model, *examples())
    assert int(model.optimizer.iterations) == model.objective.updates_per_batch == 4
