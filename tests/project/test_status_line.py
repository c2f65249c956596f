"""The line that shows progress, in a terminal and in a file."""

import io
import threading

import pytest

from he_keras.status_line import StatusLine, Ticker, clock_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(stream, times):
    """What is shown if the work is a thousandth further at each second, of a thousand."""
    clock = Clock()
    with StatusLine("work", stream=stream, clock=clock) as line:
        for clock.now in times:
            line.count(clock.now, 1000, "doing")
    return stream.getvalue()


def test_a_file_gets_whole_lines_and_ever_fewer():
    text = shown(io.StringIO(), range(1000))
    assert not {"\r", "\x1b"} & set(text)
    seconds = [
        60 * int(line.split()[2].split(":")[0]) + int(line.split()[2].split(":")[1])
        for line in text.splitlines()[:-1]
    ]
    assert seconds[:3] == [10, 20, 30] and len(seconds) < 40
    pauses = [after - before for before, after in zip(seconds, seconds[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[-1] > 80
    assert text.splitlines()[0] == "work 1%, 0:10 gone, 16:30 left, doing"
    assert text.splitlines()[-1] == "work 100%, 16:39 gone, doing"


def test_work_of_seconds_gets_one_line():
    assert shown(io.StringIO(), range(8)) == "work 1%, 0:07 gone, doing\n"


def test_a_terminal_has_one_line_that_moves():
    text = shown(Terminal(), range(0, 1000, 250))
    states = [each for each in text.split("\r") if each.strip()]
    assert len(states) >= 4
    assert "50%" in states[-2] or "75%" in states[-2]
    assert "0:00 gone" in states[0] or "work" in states[0]
    assert "12:30 gone" in states[-1]


def test_nothing_is_shown_unless_asked_for(capsys):
    with StatusLine("work", show=False) as line:
        line.update(0.5, "doing")
    assert capsys.readouterr() == ("", "")


def test_lines_that_stay(capsys):
    line = StatusLine("work", show=True)
    line.say("epoch 1")
    assert capsys.readouterr().out == "epoch 1\n"
    line.close()


def test_texts_of_times():
    assert [clock_text(each) for each in (0, 59.6, 3599, 7265)] == [
        "0:00",
        "1:00",
        "59:59",
        "2:01:05",
    ]


def test_a_ticker_ends_with_its_block():
    calls = []
    with Ticker(lambda: calls.append(1), is_on=False):
        pass
    before = threading.active_count()
    with Ticker(lambda: calls.append(1)):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_an_error_and_work_of_a_moment_leave_no_line_in_a_log():
    stream = io.StringIO()
    with StatusLine("work", stream=stream, last_line=False) as line:
        line.count(1, 1, "done")
    with pytest.raises(ValueError), StatusLine("work", stream=stream) as line:
        raise ValueError
    assert stream.getvalue() == ""
