"""Programs in processes of their own, forked where TensorFlow is imported already.

An import of TensorFlow takes seconds of CPU time, which a test that starts twenty programs
pays twenty times. Nothing is written and nothing can be resumed meanwhile.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile

from programs import ROOT
from waiting import HANGING_SECONDS, wait_until

CONTEXT = multiprocessing.get_context("forkserver")
# Imports only: a process that has computed with TensorFlow cannot be forked.
CONTEXT.set_forkserver_preload(
    ["he_keras.experiment", "he_keras.serving", "he_keras.evaluation", "he_keras.search"]
)


def run_script(script, *arguments):
    """What `python SCRIPT ARGUMENTS` does."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _run(target, arguments, files, environment):
    os.chdir(ROOT)
    # As a shell starts a program in the foreground: SIGINT not ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    for stream, path in zip((1, 2), files, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    target(*arguments)


class Program:
    """Runs a function of a test file, or `run_script`, with a part of the interface of `Popen`."""

    def __init__(self, target, *arguments, **environment):
        self._folder = tempfile.TemporaryDirectory()
        self.files = [os.path.join(self._folder.name, name) for name in ("out", "err")]
        for path in self.files:
            open(path, "w").close()
        arguments = [str(argument) for argument in arguments]
        self._process = CONTEXT.Process(
            target=_run, args=(target, arguments, self.files, environment)
        )
        self._process.start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=HANGING_SECONDS):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def wait_for(self, condition):
        """Waits until something holds, which must happen before the program ends."""

        def holds():
            holding = condition()
            assert holding or self.poll() is None, f"ended with {self.poll()}: {self.texts()}"
            return holding

        wait_until(holds, self.texts)

    def texts(self):
        """Returns what it has printed so far, to standard output and to standard error."""
        answers = []
        for path in self.files:
            with open(path, errors="replace") as file:
                answers.append(file.read())
        return answers

    def communicate(self, timeout=HANGING_SECONDS):
        self.wait(timeout)
        return self.texts()
