"""How far an evaluation has come."""

import threading
from collections.abc import Sequence

import numpy as np

from he_keras.attacks import Attack

_TICK_SECONDS = 1.0


class Progress:
    """Shows the passes that are done, and the worst case so far.

    It counts passes and not examples, because some attacks take a hundred times as many as others.
    The name of an attack appears when it begins. The clock goes on within a batch, because the
    first batch takes as long as its compilation.

    Args:
        num_examples: how many examples will be attacked.
        attacks: the attacks that run on each example.
        num_classes: the model's number of classes.
        show: False shows nothing.
    """

    def __init__(
        self, num_examples: int, attacks: Sequence[Attack], num_classes: int, show: bool
    ) -> None:
        self._bar = None
        self._num_classes = num_classes
        self._finished = self._held = self._passes = 0
        if show:
            from tqdm import tqdm

            self._bar = tqdm(
                total=num_examples * sum(map(self._cost, attacks)),
                unit="pass",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=_TICK_SECONDS,
            )
            self._closed = threading.Event()
            ticker = threading.Thread(
                target=_tick, args=(self._bar, self._closed), name="he-keras-progress", daemon=True
            )
            ticker.start()

    def batch_begins(self, name: str) -> None:
        """Names the attack that runs now."""
        if self._bar is not None:
            self._bar.set_description(name)

    def batch_done(self, attack: Attack, num_attacked: int, unbroken: np.ndarray, block) -> None:
        """Shows how many examples are left after one more batch of an attack."""
        if self._bar is not None:
            held = self._held + int(unbroken.sum())
            share = held / (self._finished + len(block.positions))
            self._bar.set_postfix(robust=f"{share:.2%}", refresh=False)
            self._bar.update(num_attacked * self._cost(attack))

    def attack_done(self, attack: Attack, num_examples: int) -> None:
        """Moves to the end of an attack on one block, whatever it left out."""
        self._passes += num_examples * self._cost(attack)
        if self._bar is not None:
            self._bar.update(self._passes - self._bar.n)

    def block_done(self, unbroken: np.ndarray) -> None:
        """Adds a block to those that are done."""
        self._finished += len(unbroken)
        self._held += int(unbroken.sum())

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._closed.set()
            self._bar.close()

    def _cost(self, attack: Attack) -> int:
        return attack.most_passes(self._num_classes)


def _tick(bar, closed: threading.Event) -> None:
    while not closed.wait(_TICK_SECONDS):
        bar.refresh()
