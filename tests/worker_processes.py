"""Starts the workers of a multi-worker strategy as processes of this machine, on free ports."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 400


def cluster(count):
    """TF_CONFIG of each worker, with ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            place = stack.enter_context(socket.socket())
            place.bind(("127.0.0.1", 0))
            ports.append(place.getsockname()[1])
    hosts = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    tasks = [{"type": "worker", "index": index} for index in range(count)]
    return [json.dumps({"cluster": hosts, "task": task}) for task in tasks]


@contextlib.contextmanager
def workers(*arguments, count=2):
    """Runs `python ARGUMENTS` in each worker; what still runs at the end is killed.

    "{index}" in an argument becomes the worker's number.
    """
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    running = []
    try:
        for index, config in enumerate(cluster(count)):
            command = [str(each).replace("{index}", str(index)) for each in arguments]
            running.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env={**os.environ, **threads, "TF_CONFIG": config},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    # As a shell starts a program in the foreground: SIGINT not ignored.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                )
            )
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def answers(running):
    """Waits for workers; returns (exit code, output, errors) of each."""
    deadline = time.monotonic() + SECONDS
    texts = [
        process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in running
    ]
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


def run_workers(*arguments, count=2):
    """Runs workers to their end; returns what `answers` does."""
    with workers(*arguments, count=count) as running:
        return answers(running)
