"""Strategies by name, what each of them needs, and what a training run makes of them."""

import json

import keras
import pytest
import tensorflow as tf
import tiny_config
from programs import assert_one_line_error, run_here
from replicated_training import mirrored

import he_keras as he
from he_keras import distribution
from he_keras.distribution import keras_repairs, strategies, workers
from he_keras.experiment import build_optimizer, prepare_training

WORKERS = {"worker": ["localhost:1", "localhost:2"]}


class Untouched:
    """Stands for a strategy that must not be made."""

    def __init__(self, *_, **__):
        raise AssertionError("made in spite of the error")


def test_none_is_one_device():
    chosen = distribution.strategy("none")
    assert chosen is tf.distribute.get_strategy()
    assert distribution.describe(chosen) == "One device"
    assert workers.count(chosen) == workers.local_replicas(chosen) == 1
    assert distribution.is_chief(chosen)
    assert not distribution.needs_static_shapes(chosen)


@pytest.mark.parametrize("setting", ["gradient_accumulation_steps", "ema_overwrite_frequency"])
def test_what_keras_cannot_do_on_replicas_is_refused_before_any_work(setting):
    """Inside a loss scale too, and as plain data; on one device it is Keras's own."""
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, **{setting: 2})
    scaled = keras.optimizers.LossScaleOptimizer(optimizer)
    plain_data = keras.saving.serialize_keras_object(optimizer)
    for each in (optimizer, scaled, plain_data):
        keras_repairs.check_compile(tf.distribute.get_strategy(), False, 1, each)
        with pytest.raises(ValueError, match=f"on more than one replica.*received {setting}=2"):
            keras_repairs.check_compile(mirrored(), False, 1, each)


def test_mirrored_takes_all_devices_of_the_machine():
    chosen = distribution.strategy("mirrored")
    assert chosen.num_replicas_in_sync == 2
    assert distribution.describe(chosen) == (
        "Mirrored on CPU:0, CPU:1; TensorFlow finds no GPU here"
    )
    assert (workers.count(chosen), workers.local_replicas(chosen)) == (1, 2)


def test_mirrored_on_a_single_device_says_so(monkeypatch):
    cpu = tf.config.list_logical_devices("CPU")[:1]
    found = {"GPU": [], "CPU": cpu}
    monkeypatch.setattr(strategies.tf.config, "list_logical_devices", found.get)
    chosen = distribution.strategy("mirrored")
    assert chosen.num_replicas_in_sync == 1
    assert distribution.describe(chosen) == (
        "Mirrored on CPU:0; a single device trains as without a strategy; "
        "TensorFlow finds no GPU here"
    )


def test_mirrored_prefers_gpus(monkeypatch):
    found = {
        "GPU": [tf.config.LogicalDevice("/device:GPU:0", "GPU")],
        "CPU": tf.config.list_logical_devices("CPU"),
    }
    monkeypatch.setattr(strategies.tf.config, "list_logical_devices", found.get)
    monkeypatch.setattr(strategies.tf.distribute, "MirroredStrategy", lambda devices: devices)
    assert distribution.strategy("mirrored") == ["/device:GPU:0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mirorred"], r"expected one of .*'mirrored'.*; received strategy='mirorred'"),
        (["mirrored", "tpu-1"], "expected strategy='tpu'; received strategy='mirrored', tpu_a"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        distribution.strategy(*arguments)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "worker",
        "[]",
        json.dumps({"cluster": WORKERS}),
        json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 2}}),
        json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": -1}}),
        json.dumps({"cluster": WORKERS, "task": {"type": "chief", "index": 0}}),
        json.dumps({"cluster": [], "task": {"type": "worker", "index": 0}}),
        json.dumps({"cluster": {**WORKERS, "ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}),
    ],
)
def test_workers_need_a_cluster(content, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if content is not None:
        monkeypatch.setenv("TF_CONFIG", content)
    monkeypatch.setattr(strategies.tf.distribute, "MultiWorkerMirroredStrategy", Untouched)
    with pytest.raises(ValueError, match=r'TF_CONFIG in every worker; expected \{"cluster"'):
        distribution.strategy("multi_worker")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (tf.errors.DeadlineExceededError(None, None, "late\nmore"), "did not get together.*: late"),
        (RuntimeError("Collective ops must be configured"), "Too late for worker processes"),
    ],
)
def test_workers_that_do_not_meet(error, message, monkeypatch):
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": WORKERS, "task": task}))

    def fail():
        raise error

    monkeypatch.setattr(strategies.tf.distribute, "MultiWorkerMirroredStrategy", fail)
    with pytest.raises(ValueError, match=message):
        distribution.strategy("multi_worker")


def test_a_missing_tpu_is_one_line(monkeypatch, capfd):
    monkeypatch.delenv("TPU_NAME", raising=False)
    answer = run_here(
        monkeypatch, capfd, "train", "--config=tests/builders/tiny_config.py", "--strategy=tpu"
    )
    assert_one_line_error(answer, "No TPU found", "2.19.1", f"TensorFlow {tf.__version__}")


def test_a_tpu_is_set_up_in_order(monkeypatch):
    calls = []
    cluster_resolver = strategies.tf.distribute.cluster_resolver
    monkeypatch.setattr(
        cluster_resolver, "TPUClusterResolver", lambda tpu: calls.append(tpu) or "resolver"
    )
    monkeypatch.setattr(strategies.tf.config, "experimental_connect_to_cluster", calls.append)
    monkeypatch.setattr(strategies.tf.tpu.experimental, "initialize_tpu_system", calls.append)
    monkeypatch.setattr(strategies.tf.distribute, "TPUStrategy", lambda resolver: (resolver, "on"))
    assert distribution.strategy("tpu", "tpu-1") == ("resolver", "on")
    assert calls == ["tpu-1", "resolver", "resolver"]


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_the_number_of_logical_devices_is_checked(count):
    with pytest.raises(ValueError, match="expected an integer >= 1"):
        distribution.split_cpu(count)


def test_devices_cannot_be_split_later():
    tf.zeros([1])
    with pytest.raises(ValueError, match="has begun to compute and its devices are fixed"):
        distribution.split_cpu(3)


def test_one_process_agrees_with_itself():
    for chosen in (distribution.strategy("none"), mirrored()):
        assert workers.exchange(chosen, b"content") == [b"content"]
        assert workers.any_of(chosen, [True, False]) == [True, False]
        workers.check_same(chosen, b"a", "it", "one")
        with pytest.raises(ValueError, match="not writable"):
            workers.on_chief(chosen, lambda: (_ for _ in ()).throw(ValueError("not writable")))


def test_errors_of_a_single_process_are_its_own():
    error = tf.errors.UnavailableError(None, None, "gone")
    with pytest.raises(tf.errors.UnavailableError):
        with workers.explained_loss(distribution.strategy("none"), "start again"):
            raise error


def test_a_lost_worker_is_explained(monkeypatch):
    monkeypatch.setattr(workers, "count", lambda _: 2)
    text = "Graph execution error: at x.py. Collective ops is aborted by: task 1\n is unhealthy"
    with pytest.raises(distribution.WorkerLostError, match="it; start again .*Flow: task 1 is unh"):
        with workers.explained_loss(distribution.strategy("none"), "start again"):
            raise tf.errors.UnavailableError(None, None, text)


def failing_sums(monkeypatch, good_ones):
    """Lets the sums over all workers fail after the first good ones, and counts them."""
    monkeypatch.setattr(workers, "count", lambda _: 2)
    made = []

    def total(strategy, values):
        made.append(values)
        if len(made) > good_ones:
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return values

    monkeypatch.setattr(workers, "total", total)
    return made


def test_a_worker_that_leaves_first_fails_nobody(monkeypatch):
    """All had arrived, so that this one has all it needs, although it cannot ask once more."""
    made = failing_sums(monkeypatch, good_ones=1)
    workers.leave_together(distribution.strategy("none"))
    assert len(made) == 2


def test_a_worker_that_never_arrives_is_missed(monkeypatch):
    failing_sums(monkeypatch, good_ones=0)
    with pytest.raises(tf.errors.UnavailableError):
        workers.leave_together(distribution.strategy("none"))


def with_static_shapes(monkeypatch):
    monkeypatch.setattr(distribution, "needs_static_shapes", lambda _: True)


def test_shapes_are_static_for_a_tpu(tmp_path, monkeypatch):
    """58 training and 20 validation images in batches of 16: incomplete ones are left out."""
    with_static_shapes(monkeypatch)
    training = prepare_training(tiny_config.get_config(), tmp_path)
    assert training.steps == 3
    shapes = {tuple(images.shape) for images, _ in training.stream(0, 0)}
    shapes |= {tuple(images.shape) for images, _ in training.validation_batches()}
    assert shapes == {(16, 8, 8, 1)}
    assert training.stream(0, 0).element_spec[0].shape[0] == 16


def test_validation_of_less_than_a_batch_is_one_batch_on_a_tpu(tmp_path, monkeypatch):
    with_static_shapes(monkeypatch)
    config = tiny_config.get_config()
    config.evaluation.batch_size = 250
    batches = list(prepare_training(config, tmp_path).validation_batches())
    assert [tuple(images.shape) for images, _ in batches] == [(20, 8, 8, 1)]


def test_every_core_of_a_tpu_gets_a_validation_example(tmp_path, monkeypatch):
    with_static_shapes(monkeypatch)
    config = tiny_config.get_config()
    config.data.validation_examples = 1
    with pytest.raises(ValueError, match="validation_examples of 0 or at least 2; received 1"):
        prepare_training(config, tmp_path, mirrored())


def test_state_of_varying_shape_is_refused_on_a_tpu(tmp_path, monkeypatch):
    with_static_shapes(monkeypatch)
    config = tiny_config.get_config()
    with config.unlocked():
        config.objective = {"name": "free_at", "num_replays": 2}
    with pytest.raises(ValueError, match="no TPU can compile; .*received objective=FreeAT"):
        prepare_training(config, tmp_path)


def test_batches_must_split_over_a_tpu(tmp_path, monkeypatch):
    with_static_shapes(monkeypatch)
    config = tiny_config.get_config()
    config.evaluation.batch_size = 5
    with pytest.raises(ValueError, match="evaluation.batch_size to be a multiple of 2; received 5"):
        prepare_training(config, tmp_path, mirrored())


def test_every_replica_gets_an_example(tmp_path):
    config = tiny_config.get_config()
    config.train.batch_size = 1
    with pytest.raises(ValueError, match="train.batch_size of at least 2; received train.*=1"):
        prepare_training(config, tmp_path, mirrored())


@pytest.mark.parametrize(("options", "expected"), [({}, True), ({"synchronized": False}, False)])
def test_batch_norm_is_synchronised_on_replicas(tmp_path, options, expected):
    config = tiny_config.get_config()
    with config.unlocked():
        config.network.options.update(options)
    training = prepare_training(config, tmp_path / "two", mirrored())
    kinds = {
        layer.synchronized
        for layer in training.model.network.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    }
    assert kinds == {expected}
    assert training.model.distribute_strategy is mirrored()
    # The learning rate is the configured one, whatever the number of replicas.
    rate = build_optimizer(config, training.steps).get_config()["learning_rate"]
    assert training.model.optimizer.get_config()["learning_rate"] == rate


def test_every_replica_has_a_seed_of_its_own():
    strategy = mirrored()
    with strategy.scope():
        network = keras.Sequential([keras.Input((2,)), keras.layers.Identity()])
        model = he.HEAdversarialModel(network, he.CosineHead(2), he.objectives.Standard())
        model.compile("sgd")
    seeds = strategy.experimental_local_results(strategy.run(model.step_seed))
    assert len({tuple(seed.numpy().tolist()) for seed in seeds}) == 2
