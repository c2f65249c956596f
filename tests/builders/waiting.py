"""Waiting for what another thread or process does."""

import time

#: When to give up: a hundred times what anything here takes, so that a busy machine fails no test.
HANGING_SECONDS = 900


def wait_until(condition, explanation=lambda: ""):
    """Returns when the condition holds; fails, with an explanation, where it hangs."""
    give_up = time.monotonic() + HANGING_SECONDS
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"Nothing for {HANGING_SECONDS} s: {explanation()}")
        time.sleep(0.01)
