"""Ctrl-C that is not lost on its way.

Python's own handler raises a KeyboardInterrupt wherever the program happens to be. In a finaliser,
of which TensorFlow has many while it traces, Python drops it and the program goes on; in a call
from native code it comes out as another error. An export that went on to its end has been seen, and
one that ended with a TypeError of a layer.
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

#: Time for the finaliser to return, in seconds.
_PAUSE = 0.02
_asked = threading.Event()


def was_asked() -> bool:
    """Whether Ctrl-C was pressed: then any error may be what became of it."""
    return _asked.is_set()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Raises a KeyboardInterrupt once more where Python has dropped it."""
    _asked.clear()
    report, report_error = sys.unraisablehook, sys.excepthook

    def interrupt(signal_number, frame):
        _asked.set()
        raise KeyboardInterrupt

    def raise_again(unraisable) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here: it would be dropped as well.
            timer = threading.Timer(_PAUSE, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        else:
            report(unraisable)

    def report_others(*error) -> None:
        # Native code prints what it makes of Ctrl-C, with a traceback; `cli.run` says it in a word.
        if not was_asked():
            report_error(*error)

    handler = signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook, sys.excepthook = raise_again, report_others
    try:
        yield
    finally:
        _asked.clear()
        sys.unraisablehook, sys.excepthook = report, report_error
        signal.signal(signal.SIGINT, handler)
