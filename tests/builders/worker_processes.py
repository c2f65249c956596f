"""Starts the workers of a multi-worker strategy as processes of this machine, on free ports."""

import contextlib
import json
import socket

from forked_programs import Program, run_script


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
    """Runs the script and its arguments in each worker; what still runs at the end is killed.

    "{index}" in an argument becomes the worker's number.
    """
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    running = []
    try:
        for index, config in enumerate(cluster(count)):
            command = [str(each).replace("{index}", str(index)) for each in arguments]
            running.append(Program(run_script, *command, **threads, TF_CONFIG=config))
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def answers(running):
    """Waits for workers; returns (exit code, output, errors) of each."""
    texts = [process.communicate() for process in running]
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


def run_workers(*arguments, count=2):
    """Runs workers to their end; returns what `answers` does."""
    with workers(*arguments, count=count) as running:
        return answers(running)
