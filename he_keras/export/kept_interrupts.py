"""Ctrl-C while something is written: it is not lost on its way, and clearing up is not cut short.

Python raises a KeyboardInterrupt wherever the program happens to be. In a finaliser, of which
TensorFlow has many while it traces, and in some calls from native code it is dropped: the program
goes on, and would publish what its user has just stopped. Other native code prints the traceback of
an error that it makes of it.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


class KeptInterrupts:
    """Takes note of each Ctrl-C that the program's own handler turns into an exception.

    A context manager. Outside of the main thread, and where the program handles Ctrl-C without
    Python, it changes nothing.

    Example:
        >>> from he_keras.export.kept_interrupts import KeptInterrupts
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
        >>> with KeptInterrupts() as interrupts:
        ...     try:
        ...         signal.raise_signal(signal.SIGINT)
        ...     except KeyboardInterrupt:
        ...         print("lost")
        ...     try:
        ...         interrupts.check()
        ...     except KeyboardInterrupt:
        ...         print("found")
        lost
        found
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self) -> None:
        # A function, unless the system or other code than Python's handles it.
        self._before: Any = signal.getsignal(signal.SIGINT)
        self._report = sys.excepthook
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_active = in_main_thread and callable(self._before)
        self._was_raised = False
        self._is_held = False
        self._is_waiting = False

    def __enter__(self) -> "KeptInterrupts":
        if self._is_active:
            signal.signal(signal.SIGINT, self._handle)
            sys.excepthook = self._report_others
        return self

    def __exit__(self, *_) -> None:
        if self._is_active:
            sys.excepthook = self._report
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises a KeyboardInterrupt if there has been one, whatever became of it."""
        if self._was_raised:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lets Ctrl-C wait for the end of what must not be left half done."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._is_waiting:
                self._is_waiting = False
                self._handle(signal.SIGINT, None)

    def _handle(self, number, frame) -> None:
        if self._is_held:
            self._is_waiting = True
            return
        try:
            self._before(number, frame)
        except BaseException:
            self._was_raised = True
            raise

    def _report_others(self, *error) -> None:
        """In place of what native code calls to print an error that it has no other use for."""
        if not self._was_raised:
            self._report(*error)
