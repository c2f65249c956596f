"""Where a training step's time goes: the seconds of each kind of operation.

TensorFlow's profiler records every operation of one step, in all threads. An operation's time is
what it took itself, without what ran inside it. Two that run at the same time both count.
"""

import collections
import pathlib
import tempfile

#: Kernels by what they compute; the first pattern that the kernel's name contains counts.
_KINDS = {
    "Conv2DBackpropInput": "convolutions, gradient of the input",
    "Conv2DBackpropFilter": "convolutions, gradient of the kernel",
    "Conv2D": "convolutions, forward",
    "MatMul": "matrix products",
    "ReluGrad": "gradient of ReLU",
    "BatchNorm": "batch norm",
    "Add": "additions and updates",
    "Mul": "multiplications",
    "Slice": "slices and padding",
    "Pad": "slices and padding",
    "Concat": "slices and padding",
    "ParallelFor": "slices and padding",
    "Cast": "casts",
    "Pool": "pooling",
}
OTHER = "everything else"
_SCHEDULER = ""


def measure(cell) -> str:
    """Returns the table of one cell's step, see `training.Cell`."""
    from he_keras.benchmarks.training_worker import KerasSide

    side = KerasSide(cell)
    side.first()
    for _ in range(3):
        side.step()
    with tempfile.TemporaryDirectory() as folder:
        seconds, took = _profiled(side, pathlib.Path(folder))
    kinds: collections.Counter = collections.Counter()
    for name, value in seconds.items():
        kinds[kind_of(name)] += value
    return table(
        kinds, took, f"{cell.objective}, {cell.network}, {cell.dtype}, batch {cell.batch_size}"
    )


def kind_of(kernel: str) -> str:
    """Returns what a kernel computes.

    Example:
        >>> kind_of("_MklNativeFusedConv2D")
        'convolutions, forward'
    """
    return next((kind for part, kind in _KINDS.items() if part in kernel), OTHER)


def table(kinds, took: float, title: str) -> str:
    """Returns the lines of the table."""
    total = sum(kinds.values())
    lines = [f"{title}: a step of {took:.3f} s", f"{'':<40}{'thread ms':>10}{'share':>8}"]
    for kind, value in sorted(kinds.items(), key=lambda item: (item[0] == OTHER, -item[1])):
        lines.append(f"{kind:<40}{1000 * value:>10.0f}{value / total:>8.1%}")
    return "\n".join(lines)


def _profiled(side, folder: pathlib.Path):
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    tf.profiler.experimental.start(str(folder))
    took = side.step()
    tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace()
    space.ParseFromString(next(folder.rglob("*.xplane.pb")).read_bytes())
    seconds: collections.Counter = collections.Counter()
    for plane in space.planes:
        if "CPU" in plane.name:
            for line in plane.lines:
                _add_line(seconds, plane, line)
    del seconds[_SCHEDULER]
    return seconds, took


def _kernel(event: str) -> str:
    """An operation is recorded as "name:Kernel"; TensorFlow's own functions are not operations."""
    if event == "ParallelFor":
        return event
    name = event.split("#")[0]
    return _SCHEDULER if "::" in name or ":" not in name else name.rsplit(":", 1)[1]


def _add_line(seconds: collections.Counter, plane, line) -> None:
    """Adds the operations of one thread, each without those inside it."""
    events = sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps))
    open_events: list = []
    for event in events:
        while open_events and open_events[-1][0] <= event.offset_ps:
            open_events.pop()
        kernel = _kernel(plane.event_metadata[event.metadata_id].name)
        if open_events:
            seconds[open_events[-1][1]] -= event.duration_ps / 1e12
        seconds[kernel] += event.duration_ps / 1e12
        open_events.append((event.offset_ps + event.duration_ps, kernel))
