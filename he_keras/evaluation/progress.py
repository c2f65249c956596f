"""The progress bar of an evaluation, with the running robust accuracy."""

import numpy as np


class Progress:
    """Counts examples x attacks; shows the worst case over the blocks that are done.

    Args:
        num_examples: that will be attacked.
        num_attacks: that run on each.
        show: False shows nothing.
    """

    def __init__(self, num_examples: int, num_attacks: int, show: bool) -> None:
        self._bar = None
        self._finished = self._held = 0
        if show:
            from tqdm import tqdm

            self._bar = tqdm(
                total=num_examples * num_attacks,
                unit="image",
                dynamic_ncols=True,
                mininterval=1.0,
            )

    def batch_done(self, name: str, unbroken: np.ndarray, block) -> None:
        """Shows how many examples are left after one more batch of an attack."""
        if self._bar is not None:
            held = self._held + int(unbroken.sum())
            share = held / (self._finished + len(block.positions))
            self._bar.set_description(name, refresh=False)
            self._bar.set_postfix(robust=f"{share:.2%}")

    def attack_done(self, num_examples: int) -> None:
        """Moves on by one attack on one block."""
        if self._bar is not None:
            self._bar.update(num_examples)

    def block_done(self, unbroken: np.ndarray) -> None:
        """Adds a block to those that are done."""
        self._finished += len(unbroken)
        self._held += int(unbroken.sum())

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
