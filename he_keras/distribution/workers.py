"""The processes of a multi-worker strategy: who writes files, and what all of them agree on.

Every function takes the strategy and works for any: with one process there is nothing to agree on.
What the processes exchange goes through the strategy's own all-reduce, so all of them must make
the same calls in the same order.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

_WORD = np.dtype(np.int32).itemsize
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


class WorkerLostError(RuntimeError):
    """Another worker process has ended, so that this one cannot go on."""


def count(strategy: tf.distribute.Strategy) -> int:
    """Number of worker processes."""
    return strategy.num_replicas_in_sync // local_replicas(strategy)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Number of replicas in this process."""
    if not _is_multi_worker(strategy):
        return strategy.num_replicas_in_sync
    return len(strategy.extended.worker_devices)


def number(strategy: tf.distribute.Strategy) -> int:
    """Number of this process, from 0, in the order of its replicas."""
    if not _is_multi_worker(strategy):
        return 0
    resolver = strategy.cluster_resolver
    chiefs = resolver.cluster_spec().as_dict().get("chief", [])
    return resolver.task_id + (len(chiefs) if resolver.task_type == "worker" else 0)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes files: the first worker, or the only process.

    Example:
        >>> import tensorflow as tf
        >>> from he_keras.distribution import is_chief
        >>> is_chief(tf.distribute.get_strategy())
        True
    """
    return number(strategy) == 0


def total(strategy: tf.distribute.Strategy, values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the sums of integers over all processes."""
    mine = np.asarray(values, np.int32)
    # TensorFlow 2.21 crashes on the sum of empty vectors.
    if count(strategy) == 1 or not mine.size:
        return mine
    return _summing(strategy)(tf.constant(mine)).numpy()


def any_of(strategy: tf.distribute.Strategy, flags: Sequence[bool]) -> list[bool]:
    """Returns for each flag whether it is set in any process."""
    return [bool(each) for each in total(strategy, [int(flag) for flag in flags])]


def exchange(strategy: tf.distribute.Strategy, mine: bytes) -> list[bytes]:
    """Returns what each process passed, in their order, to every one of them."""
    workers = count(strategy)
    if workers == 1:
        return [mine]
    own_row = number(strategy)
    lengths = np.zeros(workers, np.int32)
    lengths[own_row] = len(mine)
    lengths = total(strategy, lengths)
    words = -(-int(lengths.max()) // _WORD)
    table = np.zeros((workers, words), np.int32)
    table[own_row] = np.frombuffer(mine.ljust(words * _WORD, b"\0"), np.int32)
    table = total(strategy, table.reshape(-1)).reshape(workers, words)
    return [row.tobytes()[:length] for row, length in zip(table, lengths, strict=True)]


def on_chief(strategy: tf.distribute.Strategy, work: Callable[[], None]) -> None:
    """Does something in the first process alone; the others wait, and fail if it fails there."""
    if count(strategy) == 1:
        work()
        return
    refusal = ""
    if is_chief(strategy):
        try:
            work()
        except (ValueError, OSError) as error:
            refusal = str(error) or type(error).__name__
    refusal = exchange(strategy, refusal.encode())[0].decode()
    if refusal:
        raise ValueError(refusal)


def check_same(strategy: tf.distribute.Strategy, mine: bytes, what: str, remedy: str) -> None:
    """Raises a ValueError in every process unless all of them passed the same bytes."""
    answers = exchange(strategy, mine)
    different = [place for place, answer in enumerate(answers) if answer != answers[0]]
    if different:
        raise ValueError(
            f"Workers disagree about {what}; expected {remedy}; received other ones in workers "
            f"{different} than in worker 0"
        )


def leave_together(strategy: tf.distribute.Strategy) -> None:
    """Returns when every process has come to this point, so that none leaves while it is needed.

    A process has its sum before the others have fetched theirs from it. If it then ended, theirs
    would fail. So the first sum says that all have arrived, and the second one that all know it.
    Whoever sees the second one fail knows that, too: only a process that has its own can be gone.
    """
    if count(strategy) == 1:
        return
    total(strategy, [1])
    with contextlib.suppress(*_LOST):
        total(strategy, [1])


@contextlib.contextmanager
def explained_loss(strategy: tf.distribute.Strategy, remedy: str) -> Iterator[None]:
    """Turns what TensorFlow says when another process ends into a `WorkerLostError`."""
    try:
        yield
    except _LOST as error:
        if count(strategy) == 1:
            raise
        # The message says where in the graph it went wrong, and then what went wrong.
        reason = " ".join(str(error.message).rpartition("aborted by:")[2].split())[:200]
        raise WorkerLostError(
            f"Another worker has stopped, and this one cannot go on without it; {remedy} "
            f"(TensorFlow: {reason})"
        ) from error


def _is_multi_worker(strategy) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


@functools.cache
def _summing(strategy):
    """The compiled sum of one integer vector from each process."""
    own_first = number(strategy) * local_replicas(strategy)

    def on_replica(values):
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, own_first)
        mine = tf.where(is_first, values, tf.zeros_like(values))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def summed(values):
        sums = strategy.run(on_replica, args=(values,))
        return strategy.experimental_local_results(sums)[0]

    return summed
