"""Ctrl-C that is neither lost nor allowed to cut a clean-up short.

Python raises a KeyboardInterrupt wherever the program happens to be. In a finaliser, of which
TensorFlow has many while it traces, Python drops it and the program goes on. A call from native
code turns it into another error, and may print a traceback of that error.
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

#: Time for a finaliser to return before Ctrl-C is raised again.
_PAUSE_SECONDS = 0.02


class KeptInterrupts:
    """Remembers each Ctrl-C that the program's own handler turns into an exception.

    A context manager. It changes nothing outside of the main thread, and nothing where the program
    handles Ctrl-C without Python.

    Example:
        >>> from he_keras.interrupts import KeptInterrupts
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
        self._handler_before: Any = None
        self._is_active = False
        self._was_asked = False
        self._is_held = False
        self._is_waiting = False
        self._second_try: threading.Timer | None = None

    @property
    def was_asked(self) -> bool:
        """Whether Ctrl-C was pressed: any error may be what became of it."""
        return self._was_asked

    def __enter__(self) -> "KeptInterrupts":
        # A function, unless the system or other code than Python's handles Ctrl-C.
        self._handler_before = signal.getsignal(signal.SIGINT)
        self._hooks_before = sys.excepthook, sys.unraisablehook
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_active = in_main_thread and callable(self._handler_before)
        self._was_asked = False
        if self._is_active:
            signal.signal(signal.SIGINT, self._handle)
            sys.excepthook, sys.unraisablehook = self._report_others, self._raise_again
        return self

    def __exit__(self, *_) -> None:
        if self._is_active:
            sys.excepthook, sys.unraisablehook = self._hooks_before
            signal.signal(signal.SIGINT, self._handler_before)
            self._was_asked = False

    def check(self) -> None:
        """Raises a KeyboardInterrupt if there has been one, whatever became of it."""
        if self._was_asked or self._is_waiting:
            self._cancel_second_try()
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
            self._handler_before(number, frame)
        except BaseException:
            self._was_asked = True
            raise

    def _raise_again(self, unraisable) -> None:
        """Called in place of what reports an exception that Python drops."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hooks_before[1](unraisable)
            return
        # An exception that is raised here would be dropped as well.
        self._second_try = threading.Timer(_PAUSE_SECONDS, _thread.interrupt_main)
        self._second_try.daemon = True
        self._second_try.start()

    def _cancel_second_try(self) -> None:
        if self._second_try is not None:
            self._second_try.cancel()

    def _report_others(self, *error) -> None:
        """Called in place of what prints an error that native code has no other use for."""
        if not self._was_asked:
            self._hooks_before[0](*error)
