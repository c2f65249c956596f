"""One line that says how far some work has come: a bar in a terminal, else lines of a log."""

import sys
import threading
import time
from collections.abc import Callable

#: Seconds between two pictures of the bar.
TICK_SECONDS = 0.5
#: Seconds until the first line of a log; then a tenth of the time so far, between these limits.
_FIRST_LINE, _LONGEST_PAUSE = 10.0, 600.0
_SHARE_OF_TIME = 0.1
_FORMAT = "{desc} {percentage:3.0f}%|{bar:12}| "


def clock_text(seconds: float) -> str:
    """Returns minutes and seconds, with hours where there are any.

    Example:
        >>> from he_keras.status_line import clock_text
        >>> clock_text(75.2), clock_text(3725)
        ('1:15', '1:02:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class StatusLine:
    """Shows a share of the work, what runs now, and the time that is left.

    A terminal has a bar that moves. Anything else gets whole lines, and the longer the work takes,
    the fewer: the first one after ten seconds, then one whenever a tenth more time has passed.

    Args:
        name: what the work is.
        show: False shows nothing.
        stream: where to; None for the standard error.
        clock: seconds, for tests.
        last_line: whether a log also gets the last state. Work of a moment needs none.

    Example:
        >>> import sys
        >>> from he_keras.status_line import StatusLine
        >>> line = StatusLine("reading", stream=sys.stdout)
        >>> line.update(0.5, "file 1 of 2", seconds_left=3.0)
        >>> line.close()
        reading 50%, 0:00 gone, file 1 of 2
    """

    def __init__(
        self,
        name: str,
        show: bool = True,
        stream=None,
        clock: Callable[[], float] = time.monotonic,
        last_line: bool = True,
    ) -> None:
        self.name = name
        self._last_line = last_line
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._next = self._began
        self._share, self._text = 0.0, ""
        self._left: float | None = None
        self._lock = threading.RLock()
        self._is_shown, self._bar = show, None
        is_terminal = getattr(self._stream, "isatty", bool)()
        if show and not is_terminal:
            self._next += _FIRST_LINE
        if show and is_terminal:
            from tqdm import tqdm

            self._bar = tqdm(
                total=1.0,
                desc=name,
                bar_format=_FORMAT,
                file=self._stream,
                dynamic_ncols=True,
                mininterval=0.0,
            )

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._began

    def update(self, share: float, text: str, seconds_left: float | None = None) -> None:
        """Notes how far the work has come, and shows it if it is time.

        Args:
            share: of the work; 1 is the end. It falls where more is left than was thought.
            text: what runs now.
            seconds_left: time that is left; None where nobody knows yet.
        """
        with self._lock:
            self._share, self._text, self._left = min(share, 1.0), text, seconds_left
            if self._is_shown and self._clock() >= self._next:
                self._draw(self._left)

    def count(self, done: float, total: float, text: str) -> None:
        """Notes that so much of the work is done, of so much; the rest goes on at this speed."""
        left = self.seconds * (total - done) / done if done else None
        self.update(done / max(total, 1e-9), text, left)

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, error, *_) -> None:
        # In a log, an error is told in one line of its own.
        self._last_line = self._last_line and error is None
        self.close()

    def say(self, line: str) -> None:
        """Writes a line that stays, above the bar, to the standard output."""
        with self._lock:
            if self._bar is None:
                print(line, flush=True)
            else:
                self._bar.write(line, file=sys.stdout)

    def _draw(self, left: float | None) -> None:
        times = f"{clock_text(self.seconds)} gone"
        if left is not None:
            times += f", {clock_text(left)} left"
        # What comes last is cut off in a narrow terminal.
        text = ", ".join(filter(None, (times, self._text)))
        if self._bar is None:
            print(f"{self.name} {self._share:.0%}, {text}", file=self._stream, flush=True)
            pause = min(max(self.seconds * _SHARE_OF_TIME, _FIRST_LINE), _LONGEST_PAUSE)
            self._next = self._clock() + pause
            return
        self._bar.n = self._share
        self._bar.bar_format = _FORMAT + text.replace("{", "{{").replace("}", "}}")
        self._bar.refresh()
        self._next = self._clock() + TICK_SECONDS

    def close(self) -> None:
        """Shows the last state and leaves it there."""
        with self._lock:
            if self._is_shown and (self._bar is not None or self._last_line):
                self._draw(None)
            if self._bar is not None:
                self._bar.close()
            self._is_shown = False


class Ticker:
    """Calls a function again and again while a block runs, from a thread of its own.

    Args:
        function: what to call; an error in it would only end the thread.
        is_on: False calls nothing.
    """

    def __init__(self, function: Callable[[], object], is_on: bool = True) -> None:
        self._function, self._is_on = function, is_on
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="he-keras-progress", daemon=True)

    def __enter__(self) -> "Ticker":
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._function()
