"""`WeightAveraging`: closed forms on known weights, swapping, kill and resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stopping import Stop, StopAfter

import he_keras as he
from he_keras import callbacks
from he_keras.callbacks.weight_averaging import KINDS, WeightAveraging

IMAGES = np.random.default_rng(0).uniform(size=(12, 4)).astype("float32")
LABELS = np.arange(12) % 3
BATCHES = [(IMAGES[:8], LABELS[:8]), (IMAGES[8:], LABELS[8:])]


def make_model(strategy=None, rate=0.3, learning_rate=0.5, run_eagerly=True):
    """Steps eagerly, which is faster for a few small batches, unless it is told otherwise."""
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        norm = he.layers.BatchNormalization(synchronized=strategy is not None)
        layers = [keras.layers.Dense(5), norm, keras.layers.Dropout(rate)]
        network = keras.Sequential([keras.Input((4,)), *layers])
        model = he.HEAdversarialModel(network, keras.layers.Dense(3), evaluation_attack=None)
        optimizer = he.optimizers.SGD(learning_rate, momentum=0.9)
        model.compile(optimizer=optimizer, run_eagerly=run_eagerly and strategy is None)
    return model


def fit(model, *chosen, epochs=3, **options):
    options = {"batch_size": 4, "verbose": 0, "shuffle": False} | options
    return model.fit(IMAGES, LABELS, epochs=epochs, callbacks=list(chosen), **options).history


def assert_equal(received, expected):
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Weights(keras.callbacks.Callback):
    """Notes the trainable weights at the start, after every batch and at every epoch's end."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def now(self):
        return [np.array(each.numpy()) for each in self.model.trainable_variables]

    def on_train_begin(self, logs=None):
        self.batches.append(self.now())

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(self.now())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.now())


# The averages, on a known sequence of weights


def scripted(averaging, weights, steps_per_epoch=3, stride=1):
    """Runs the callback over a model of one weight; returns the model, which has the average."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    averaging.set_model(model)
    averaging.on_train_begin()
    model.set_weights([np.full((1, 1), weights[0])])
    rest = np.reshape(weights[1:], (-1, steps_per_epoch))
    for epoch, values in enumerate(rest):
        averaging.on_epoch_begin(epoch)
        for batch in range(0, steps_per_epoch, stride):
            averaging.on_train_batch_begin(batch)
            model.set_weights([np.full((1, 1), values[batch + stride - 1])])
            averaging.on_train_batch_end(batch + stride - 1)
        averaging.on_epoch_end(epoch)
    averaging.on_train_end()
    return float(model.get_weights()[0][0, 0])


WEIGHTS = np.array([5.0, 1.0, -2.0, 3.0, 0.5, 4.0, -1.0])


def weighted(weights, decays):
    """The average as one sum: a weight keeps the product of the decays after it."""
    after = [np.prod(decays[t:]) for t in range(len(decays) + 1)]
    shares = np.array([after[0], *[(1 - d) * after[t + 1] for t, d in enumerate(decays)]])
    assert shares.sum() == pytest.approx(1.0)
    return shares @ weights


@pytest.mark.parametrize("decay", [0.0, 0.75, 0.999])
def test_moving_average_is_the_closed_form(decay):
    averaging = WeightAveraging(decay, warm_up=False)
    expected = weighted(WEIGHTS, [decay] * 6)
    assert scripted(averaging, WEIGHTS) == pytest.approx(expected, rel=1e-5)
    assert averaging.updates == 6


def test_warm_up_lets_the_decay_grow_up_to_its_value():
    decays = [1 / 10, 2 / 11, 3 / 12, 0.3, 0.3, 0.3]
    assert scripted(WeightAveraging(0.3), WEIGHTS) == pytest.approx(weighted(WEIGHTS, decays))


def test_moving_average_starts_as_the_weights_of_its_first_epoch():
    averaging = WeightAveraging(0.75, start_epoch=1, warm_up=False)
    assert scripted(averaging, WEIGHTS) == pytest.approx(weighted(WEIGHTS[3:], [0.75] * 3))


def test_an_execution_of_several_steps_counts_as_so_many():
    averaging = WeightAveraging(0.75, warm_up=False)
    expected = weighted(WEIGHTS[[0, 3, 6]], [0.75**3] * 2)
    assert scripted(averaging, WEIGHTS, stride=3) == pytest.approx(expected)
    assert averaging.updates == 6


@pytest.mark.parametrize(("start", "expected"), [(0, (-2 + 0.5 - 1) / 3), (1, -0.25), (2, -1.0)])
def test_swa_is_the_mean_over_the_ends_of_epochs(start, expected):
    averaging = WeightAveraging(kind="swa", start_epoch=start)
    assert scripted(averaging, WEIGHTS, 2) == pytest.approx(expected)
    assert averaging.updates == 3 - start


def test_average_is_float32_where_weights_are_not():
    with_policy = keras.layers.Dense(1, use_bias=False, dtype="bfloat16")
    model = keras.Sequential([keras.Input((1,)), with_policy])
    averaging = WeightAveraging(0.75, warm_up=False)
    averaging.set_model(model)
    model.set_weights([np.ones((1, 1))])
    averaging.on_epoch_begin(0)
    model.set_weights([np.full((1, 1), 1.0078125)])  # the next bfloat16 after 1
    averaging.on_train_batch_end(0)
    average = averaging.state_arrays()["average_0"]
    assert average.dtype == np.float32
    assert float(average[0, 0]) == pytest.approx(1 + 0.0078125 / 4, abs=1e-7)


# In `fit`


@pytest.mark.fast_cases("swa")
@pytest.mark.parametrize("kind", KINDS)
def test_fit_ends_with_the_average_and_trains_as_without(kind):
    reference, seen = Weights(), Weights()
    fit(make_model(run_eagerly=False), reference, validation_data=BATCHES[0])
    model = make_model(run_eagerly=False)
    averaging = WeightAveraging(0.5, kind=kind, warm_up=False, reestimate=BATCHES)
    fit(model, averaging, seen, validation_data=BATCHES[0])
    assert_equal(sum(seen.batches, []), sum(reference.batches, []))
    sequence = reference.batches if kind == "ema" else reference.epochs
    for position, variable in enumerate(model.trainable_variables):
        weights = np.array([each[position] for each in sequence], np.float64)
        shares = [0.5**9, *(0.5 ** np.arange(9, 0, -1))] if kind == "ema" else [1 / 3] * 3
        expected = np.tensordot(shares, weights, 1)
        np.testing.assert_allclose(variable.numpy(), expected, atol=1e-6)


@pytest.mark.fast_cases("ema")
@pytest.mark.parametrize("kind", KINDS)
def test_validation_is_of_the_average_up_to_this_epoch(kind):
    for evaluate in (True, False):
        averaging = WeightAveraging(0.5, kind=kind, evaluate=evaluate, apply_at_end=False)
        model = make_model()
        history = fit(model, averaging, epochs=2, validation_data=BATCHES[0])
        own = model.evaluate(*BATCHES[0], verbose=0, return_dict=True)["loss"]
        with averaging.swap():
            averaged = model.evaluate(*BATCHES[0], verbose=0, return_dict=True)["loss"]
        assert abs(averaged - own) > 1e-4
        assert history["val_loss"][-1] == pytest.approx(averaged if evaluate else own, abs=1e-6)
        assert averaging.updates == (6 if kind == "ema" else 2)


@pytest.mark.parametrize("before", [True, False])
def test_checkpoints_of_the_average(tmp_path, before):
    path = tmp_path / "last.keras"
    averaging = WeightAveraging(kind="swa", reestimate=BATCHES)
    saving = averaging.with_average(keras.callbacks.ModelCheckpoint(path))
    model = make_model()
    fit(model, *([saving, averaging] if before else [averaging, saving]), epochs=2)
    assert averaging.updates == 2
    assert_equal(he.load_model(path).get_weights(), model.get_weights())


def test_before_its_first_epoch_nothing_is_swapped():
    averaging = WeightAveraging(start_epoch=5)
    model = make_model()
    with pytest.warns(UserWarning, match="before averaging began.*start_epoch=5"):
        history = fit(model, averaging, validation_data=BATCHES[0])
    own = model.evaluate(*BATCHES[0], verbose=0, return_dict=True)["loss"]
    assert history["val_loss"][-1] == pytest.approx(own) and not averaging.has_average
    with pytest.raises(ValueError, match="No average yet; expected.*start_epoch=5.*updates=0"):
        averaging.apply()


# Swapping


@pytest.fixture
def trained():
    averaging = WeightAveraging(0.5, reestimate=BATCHES, apply_at_end=False)
    model = make_model()
    fit(model, averaging)
    return model, averaging


def states(model):
    return [np.array(each.numpy()) for each in model.variables]


def test_swap_puts_back_exactly(trained):
    model, averaging = trained
    before = states(model)
    with averaging.swap():
        inside = states(model)
        with averaging.swap():
            assert_equal(states(model), inside)
        assert_equal(states(model), inside)
    assert_equal(states(model), before)
    changed = [not np.array_equal(a, b) for a, b in zip(inside, before, strict=True)]
    assert sum(changed) == 8  # all but the state of Dropout
    with pytest.raises(KeyError), averaging.swap():
        raise KeyError
    assert_equal(states(model), before)
    averaging.apply()
    assert_equal(states(model), inside)
    averaging.on_train_begin()
    assert_equal(states(model), inside)


def test_statistics_are_measured_once_for_each_average(trained):
    model, averaging = trained
    calls = []
    averaging.perturb = lambda model, images, labels: calls.append(1) or images
    for expected in (2, 2, 4):
        if expected == 4:
            averaging.on_train_batch_begin(0)
            averaging.on_train_batch_end(0)
        with averaging.swap():
            pass
        with averaging.swap():
            assert len(calls) == expected


def test_failing_statistics_put_back_exactly(trained):
    model, averaging = trained
    before = states(model)
    averaging.reestimate = [BATCHES[0], (np.ones((2, 7), "float32"), LABELS[:2])]
    with pytest.raises(ValueError), averaging.swap():
        pass
    assert_equal(states(model), before)
    assert [each.momentum for each in model.network.layers if hasattr(each, "momentum")] == [0.9]


def test_training_begins_with_its_own_weights_after_a_broken_validation(trained):
    model, averaging = trained
    before = states(model)
    averaging.on_test_begin()
    assert not np.array_equal(states(model)[0], before[0])
    averaging.on_train_begin()
    assert_equal(states(model), before)


def test_loaded_state_forgets_a_broken_validation_and_an_open_epoch():
    averaging, model = WeightAveraging(kind="swa", apply_at_end=False), make_model()
    fit(model, averaging, epochs=1)
    averaging.on_epoch_begin(1)
    averaging.on_test_begin()
    averaging.on_epoch_begin(2)
    averaging.load_state_arrays(averaging.state_arrays())
    model.set_weights([each + 1.0 for each in model.get_weights()])  # as from the checkpoint
    before = states(model)
    averaging.on_train_begin()
    assert_equal(states(model), before)
    averaging.on_test_begin()
    assert averaging.updates == 2


def test_average_of_another_model_is_refused(trained):
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    trained[1].set_model(other)
    with pytest.raises(ValueError, match="of another model; expected 2 arrays.*received 6"):
        trained[1].on_epoch_begin(0)


# Kill and resume


def run(path, kind, kill_at=0):
    """Trains 3 epochs of 3 batches as far as it gets, from the checkpoint if there is one."""
    model = make_model()
    averaging = WeightAveraging(0.6, 1, kind, reestimate=BATCHES, apply_at_end=False)
    resume = callbacks.ExactResume(path, every_batches=1, stateful_callbacks=[averaging])
    epoch, batch = resume.restore(model) or (0, 0)
    chosen = [averaging, StopAfter(kill_at), resume]
    if batch:
        data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4).skip(batch)
        model.fit(
            data, epochs=epoch + 1, initial_epoch=epoch, verbose=0, shuffle=False, callbacks=chosen
        )
        epoch += 1
    fit(model, *chosen, initial_epoch=epoch, validation_data=BATCHES[1])
    own = states(model)
    averaging.apply()
    return [*own, *states(model), *averaging.state_arrays().values()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What runs of either kind end with."""
    return {kind: run(tmp_path_factory.mktemp(kind) / "latest.npz", kind) for kind in KINDS}


@pytest.mark.fast_cases("swa-5")
@pytest.mark.parametrize(("kind", "kill_at"), [("ema", 2), ("ema", 6), ("swa", 5), ("swa", 7)])
def test_killed_run_ends_with_the_same_weights(tmp_path, uninterrupted, kind, kill_at):
    with pytest.raises(Stop):
        run(tmp_path / "latest.npz", kind, kill_at)
    assert_equal(run(tmp_path / "latest.npz", kind), uninterrupted[kind])


def test_checkpoint_of_another_kind_is_refused(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "latest.npz", "ema", kill_at=1)
    with pytest.raises(callbacks.CorruptCheckpointError, match="expected kind='swa'.*kind='ema'"):
        run(tmp_path / "latest.npz", "swa")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_average_as_one_device(kind):
    results = []
    for strategy in (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), None):
        model = make_model(strategy, rate=0.0, learning_rate=0.1)
        averaging = WeightAveraging(0.6, kind=kind, reestimate=BATCHES)
        history = fit(model, averaging, validation_data=BATCHES[0])
        results.append([*model.get_weights(), history["val_loss"]])
    for two, one in zip(*results, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


# Arguments, and what the docstring says of Keras


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"decay": 1.0}, r"decay; expected a number in \[0, 1\).*decay=1.0"),
        (ValueError, {"decay": -0.1}, "decay; expected.*decay=-0.1"),
        (ValueError, {"decay": float("nan")}, "decay; expected.*decay=nan"),
        (ValueError, {"start_epoch": -1}, "start_epoch; expected an integer >= 0.*=-1"),
        (ValueError, {"start_epoch": 1.5}, "start_epoch; expected an integer >= 0.*=1.5"),
        (ValueError, {"kind": "mean"}, "Unknown kind; expected.*'ema', 'swa'.*kind='mean'"),
        (TypeError, {"warm_up": 1}, "warm_up; expected True or False.*warm_up=1"),
        (TypeError, {"evaluate": "yes"}, "evaluate; expected True or False"),
        (TypeError, {"apply_at_end": None}, "apply_at_end; expected True or False"),
        (TypeError, {"reestimate": iter(BATCHES)}, "reestimate; expected.*more than once"),
        (TypeError, {"reestimate": IMAGES}, "reestimate; expected None, a list.*of ndarray"),
        (TypeError, {"reestimate": 10}, "reestimate; expected.*of int"),
        (TypeError, {"perturb": 3}, "perturb; expected a function.*received 3"),
    ],
)
def test_wrong_arguments(error, arguments, message):
    with pytest.raises(error, match=message):
        WeightAveraging(**arguments)


def test_endless_data_are_refused():
    data = tf.data.Dataset.from_tensor_slices(IMAGES).batch(4)
    WeightAveraging(reestimate=data)
    with pytest.raises(ValueError, match=r"Endless reestimate; expected.*take\(n\)"):
        WeightAveraging(reestimate=data.repeat())


def test_kerass_own_average_is_not_resumable_and_does_not_swap_exactly():
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
    model, seen = make_model(), Weights()
    model.compile(optimizer=optimizer)
    fit(model, seen, epochs=1)
    assert not np.array_equal(model.trainable_variables[0].numpy(), seen.batches[-1][0])
    swapping = keras.callbacks.SwapEMAWeights()
    swapping.set_model(model)
    model.set_weights([3.1 * each + 0.7 for each in model.get_weights()])
    before = states(model)
    swapping.on_test_begin()
    swapping.on_test_end()
    np.testing.assert_allclose(states(model)[0], before[0], atol=1e-5)
    assert not np.array_equal(states(model)[0], before[0])
