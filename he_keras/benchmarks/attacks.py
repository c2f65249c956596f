"""Attacks of he_keras and those of other packages: same weights, same images, same run.

Rounds are interleaved and the best time of each counts; the first call of each, which compiles, is
not timed. Verdicts are those of the Keras model on the images that each tool returns.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from he_keras.benchmarks import attack_peers

_WARM_UP = 4
#: As the peers are set: the attack starts at the image itself, with steps of 2/255.
_SETTINGS: dict[str, dict] = {
    "pgd-20": {"random_start": False, "step_size": attack_peers.STEP_SIZE},
    "mim-20": {"step_size": attack_peers.STEP_SIZE},
    "apgd-ce": {"num_steps": 100},
    "apgd-dlr": {"num_steps": 100},
    "apgd-t": {"num_steps": 100},
    "fab-t": {"stop_when_broken": True},
}


class Entry(NamedTuple):
    """One attack of one tool, with the best time and what it did in it."""

    attack: str
    tool: str
    seconds: float
    forward_passes: float
    backward_passes: float
    robust: np.ndarray


def measure(model, images, labels, threat, attacks, rounds: int, batch_size: int) -> str:
    """Returns the table of all attacks and tools."""
    lines = []
    for attack in attacks:
        entries = _measure_attack(attack, model, images, labels, threat, rounds, batch_size)
        lines += [_line(entry, entries[0]) for entry in entries]
        # A long run can be read while it goes on.
        print("\n".join(_line(entry, entries[0]) for entry in entries), flush=True)
    return "\n".join([header(len(labels), rounds), *lines])


def header(num_examples: int, rounds: int) -> str:
    """Returns the first line of the table."""
    return (
        f"{num_examples} images, best of {rounds} interleaved rounds; passes per image; ratio: "
        "time of the tool over that of he_keras\n"
        f"{'attack':<18}{'tool':<14}{'images/s':>10}{'forward':>10}{'backward':>10}"
        f"{'robust':>9}{'differ':>8}{'seconds':>10}{'ratio':>8}"
    )


def _measure_attack(attack, model, images, labels, threat, rounds, batch_size) -> list[Entry]:
    import he_keras as he

    ours = he.attacks.get(attack, threat, batch_size=batch_size, **_SETTINGS.get(attack, {}))
    runs: dict[str, Callable] = {"he_keras": lambda x, y: ours(model, x, y)}
    for peer in attack_peers.installed():
        if threat.norm != "linf":
            break
        run = attack_peers.build(peer, attack, model, threat.epsilon)
        if run is not None:
            runs[peer] = run
    for run in runs.values():
        run(images[:_WARM_UP], labels[:_WARM_UP])
    best: dict[str, Entry] = {}
    for _ in range(rounds):
        for tool, run in runs.items():
            entry = _timed(attack, tool, run, model, images, labels)
            if tool not in best or entry.seconds < best[tool].seconds:
                best[tool] = entry
    return list(best.values())


def _timed(attack: str, tool: str, run: Callable, model, images, labels) -> Entry:
    attack_peers.PASSES.take()
    began = time.perf_counter()
    outcome = run(images, labels)
    seconds = time.perf_counter() - began
    if isinstance(outcome, np.ndarray):
        forward, backward = np.array(attack_peers.PASSES.take()) / len(labels)
        x_adv = outcome
    else:
        forward, backward = outcome.forward_passes.mean(), outcome.backward_passes.mean()
        x_adv = outcome.x_adv
    robust = model.predict(x_adv, verbose=0).argmax(axis=1) == labels
    return Entry(attack, tool, seconds, forward, backward, robust)


def _line(entry: Entry, ours: Entry) -> str:
    differ = int(np.sum(entry.robust != ours.robust))
    return (
        f"{entry.attack:<18}{entry.tool:<14}{len(entry.robust) / entry.seconds:>10.1f}"
        f"{entry.forward_passes:>10.1f}{entry.backward_passes:>10.1f}"
        f"{entry.robust.mean():>9.2%}{differ:>8}{entry.seconds:>10.2f}"
        f"{entry.seconds / ours.seconds:>8.2f}"
    )
