"""Peak memory of attacks, compared with one plain forward and backward pass of the same batch.

Each runs in a process of its own, which first compiles on a few images. The figure is the resident
memory that the work on one full batch adds at its peak (Linux only).
"""

import functools
import multiprocessing
import pathlib
import re

_WARM_UP = 4
PLAIN = "(forward and backward)"


def measure(model_path: str, images, labels, threat, attacks) -> str:
    """Returns the table: megabytes of the plain pass, and of each attack with their ratio."""
    lines = [
        f"batch of {len(labels)}; its images take {images.nbytes / 1e6:.0f} MB; ratio: (peak - "
        "images) over the plain pass's peak",
        f"{'attack':<26}{'peak MB':>10}{'ratio':>8}",
    ]
    plain = _in_process(model_path, images, labels, threat, None)
    lines.append(f"{PLAIN:<26}{plain / 1e6:>10.0f}{1.0:>8.2f}")
    for attack in attacks:
        peak = _in_process(model_path, images, labels, threat, attack)
        lines.append(f"{attack:<26}{peak / 1e6:>10.0f}{(peak - images.nbytes) / plain:>8.2f}")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _in_process(*arguments) -> float:
    """Runs `_peak` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, arguments)


def _peak(model_path: str, images, labels, threat, attack: str | None) -> float:
    """Returns the bytes that the work adds to the resident memory at its peak."""
    from he_keras.model_files import load_classifier

    run = _plain_pass if attack is None else functools.partial(_attack, attack, threat)
    work = run(load_classifier(model_path), len(labels))
    work(images[:_WARM_UP], labels[:_WARM_UP])
    forget_peak()
    before = resident("VmRSS")
    work(images, labels)
    return resident("VmHWM") - before


def _plain_pass(model, _batch_size: int):
    """The gradient of the cross-entropy in the images, compiled."""
    import tensorflow as tf

    import he_keras as he

    victim = he.attacks.Victim(model)

    def gradient(images, labels):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(images)
            loss = he.losses.cross_entropy(victim.logits(images), labels)
        return tape.gradient(loss, images)

    compiled = tf.function(gradient, reduce_retracing=True)
    return lambda images, labels: compiled(tf.constant(images), tf.constant(labels)).numpy()


def _attack(name: str, threat, model, batch_size: int):
    import he_keras as he

    attack = he.attacks.get(name, threat, batch_size=batch_size)
    return lambda images, labels: attack(model, images, labels)


def forget_peak() -> None:
    """Makes this process's peak of resident memory what it takes now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Returns the bytes of a field of this process's /proc/self/status."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    if found is None:
        raise OSError(f"No {field} in /proc/self/status; expected Linux; received another system")
    return int(found[1]) * 1024
