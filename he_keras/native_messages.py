"""Hides what TensorFlow's libraries print while they are loaded, before they read any log level."""

import contextlib
import os
import sys
from collections.abc import Iterator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Sends the standard error stream of native code to nowhere, inside a `with` block.

    Exceptions are not affected. TF_CPP_MIN_LOG_LEVEL=0 shows everything; unless the variable is
    set, TensorFlow keeps its notes to itself afterwards, and prints warnings and errors.
    """
    if os.environ.setdefault(_LEVEL, "1") == "0" or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(nowhere)
        os.close(stderr)
