"""`strategy(name)`: from a name to a `tf.distribute` strategy, or an error that says why not.

| name | devices |
|---|---|
| none | one: the first GPU, else the CPU |
| mirrored | all GPUs of this machine; without any, its logical CPU devices |
| multi_worker | the same of every process that the environment variable TF_CONFIG lists |
| tpu | all cores of a TPU |

Everything but "none" has to be asked for before TensorFlow first computes something.
"""

import json
import os

import tensorflow as tf

from he_keras.arguments import check_choice

STRATEGIES = ("none", "mirrored", "multi_worker", "tpu")
_JOBS = ("chief", "worker")
_TF_CONFIG_FORM = (
    '{"cluster": {"worker": ["host1:port", "host2:port"]}, "task": {"type": "worker", "index": 0}}'
)


def strategy(name: str = "none", tpu_address: str = "") -> tf.distribute.Strategy:
    """Makes a strategy; a model that is made in its `scope()` trains on its devices.

    Args:
        name: "none", "mirrored", "multi_worker" or "tpu".
        tpu_address: name or address of the TPU; "" for that of the machine.

    Raises:
        ValueError: The name is unknown, TF_CONFIG is missing or wrong, no TPU is found, or it is
            too late.

    Example:
        >>> import he_keras as he
        >>> from he_keras.distribution import strategy
        >>> with strategy("none").scope():
        ...     head = he.CosineHead(10)
        >>> strategy("none").num_replicas_in_sync
        1
    """
    check_choice("strategy", name, STRATEGIES)
    if tpu_address and name != "tpu":
        raise ValueError(
            "A TPU's address without the strategy for it; expected strategy='tpu'; "
            f"received strategy={name!r}, tpu_address={tpu_address!r}"
        )
    if name == "none":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        return _mirrored()
    return _multi_worker() if name == "multi_worker" else _tpu(tpu_address)


def split_cpu(count: int) -> None:
    """Splits this machine's CPU into so many logical devices: replicas where there is no GPU.

    It is no faster than one device; it serves to try out what would run on several.

    Args:
        count: the number of devices, at least 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"Invalid number of logical devices; expected an integer >= 1; received {count!r}"
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    try:
        tf.config.set_logical_device_configuration(cpu, parts)
    except RuntimeError as error:
        raise ValueError(
            "TensorFlow has begun to compute and its devices are fixed; expected split_cpu before "
            f"anything else; received count={count}: {error}"
        ) from error


def describe(chosen: tf.distribute.Strategy) -> str:
    """Says in one line what a strategy spreads the batches over.

    Example:
        >>> from he_keras.distribution import describe, strategy
        >>> describe(strategy("none"))
        'One device'
    """
    replicas = chosen.num_replicas_in_sync
    if isinstance(chosen, tf.distribute.MultiWorkerMirroredStrategy):
        cluster = chosen.cluster_resolver.cluster_spec()
        count = sum(cluster.num_tasks(job) for job in cluster.jobs if job in _JOBS)
        task = f"{chosen.cluster_resolver.task_type} {chosen.cluster_resolver.task_id}"
        return f"{replicas} replicas in {count} workers; this is {task}"
    if isinstance(chosen, tf.distribute.MirroredStrategy):
        devices = ", ".join(device.rpartition("device:")[2] for device in _devices(chosen))
        alone = "; a single device trains as without a strategy" if replicas == 1 else ""
        # Whoever asks for this strategy most often means the GPUs.
        missing = "" if "GPU" in devices else "; TensorFlow finds no GPU here"
        return f"Mirrored on {devices}{alone}{missing}"
    return "One device" if replicas == 1 else f"{replicas} replicas"


def needs_static_shapes(chosen: tf.distribute.Strategy) -> bool:
    """Whether the devices run compiled programs for one shape of batch only: TPUs."""
    return isinstance(chosen, tf.distribute.TPUStrategy)


def _devices(chosen) -> tuple[str, ...]:
    return chosen.extended.worker_devices


def _mirrored() -> tf.distribute.Strategy:
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return tf.distribute.MirroredStrategy([gpu.name for gpu in gpus])
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU")]
    # The default, collective operations, allows one strategy in a process.
    one_device = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(cpus, cross_device_ops=one_device)


def _multi_worker() -> tf.distribute.Strategy:
    _check_cluster(os.environ.get("TF_CONFIG", ""))
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise ValueError(
            "Too late for worker processes; expected strategy('multi_worker') before TensorFlow "
            f"computes anything; received {error}"
        ) from error
    except tf.errors.OpError as error:
        raise ValueError(
            "The workers did not get together; expected every worker of TF_CONFIG to be started, "
            "all anew, with a free port of its own; received "
            f"TF_CONFIG={os.environ['TF_CONFIG']}: {_first_line(error)}"
        ) from error


def _check_cluster(text: str) -> None:
    """Raises a ValueError unless TF_CONFIG describes a cluster and this process's place in it."""
    try:
        config = json.loads(text)
        task = config["task"]
        cluster = {job: list(hosts) for job, hosts in config["cluster"].items()}
        has_place = 0 <= int(task["index"]) < len(cluster[task["type"]])
    except (KeyError, TypeError, ValueError, AttributeError):
        has_place, cluster = False, {}
    if not has_place or not set(cluster) <= set(_JOBS):
        raise ValueError(
            "multi_worker needs the environment variable TF_CONFIG in every worker; expected "
            f"{_TF_CONFIG_FORM} with the worker's own index; received TF_CONFIG={text!r}"
        )


def _tpu(address: str) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    # What is raised depends on the environment, on missing clients as well as on the machine.
    except Exception as error:
        raise ValueError(
            "No TPU found; expected a TPU host with the package tensorflow-tpu, whose last "
            f"version is for TensorFlow 2.19.1 (docs/reference/devices.md); received TensorFlow "
            f"{tf.__version__}, {type(error).__name__}: {_first_line(error)}"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
