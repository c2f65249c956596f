"""Kills, signals, new and broken versions while clients ask: nobody gets a wrong answer."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import requests
from forked_programs import Program
from served_models import publish, random_images, running_server, save_model, serve_pixels

pytestmark = pytest.mark.slow
IMAGES = random_images(2)
NUM_FACTORS = 3
NUM_KILLS = 5


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    names = ("serving_default", "slow")
    return [save_model(folder / str(each), each, names) for each in range(1, NUM_FACTORS + 1)]


def factor_of(version):
    return 1 + version % NUM_FACTORS


def new_version(templates, folder, version):
    publish(templates[factor_of(version) - 1], folder, version)


@pytest.fixture
def folder(tmp_path, templates):
    folder = tmp_path / "pixels"
    folder.mkdir()
    new_version(templates, folder, 1)
    return folder


@contextlib.contextmanager
def serving(folder, **options):
    with running_server(f"--model_dir={folder}", "--poll_seconds=0.1", **options) as server:
        yield server


def answered_factor(answer):
    """Returns the factor of the version that answered, after checking every number."""
    assert answer.status_code == 200, answer.text
    logits = np.array(answer.json()["outputs"]["logits"])
    factor = round(float(logits[0, 0] / IMAGES[0, 0, 0, 0]))
    np.testing.assert_allclose(logits, factor * IMAGES[:, 0, :, 0], rtol=1e-6)
    return factor


class Load:
    """Clients that ask all the time, and the factors, by client, and errors that they got."""

    def __init__(self, server, may_fail=False):
        self.server, self.may_fail = server, may_fail
        self.factors, self.errors = [[] for _ in range(4)], []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=[each]) for each in self.factors]

    def ask(self, factors):
        while not self.stopping.is_set():
            try:
                factors.append(answered_factor(self.server.predict({"inputs": IMAGES.tolist()})))
                # Leaves the server some of the CPU, for the loading of versions.
                time.sleep(0.01)
            except requests.exceptions.RequestException as error:
                if not self.may_fail:
                    self.errors.append(error)
                time.sleep(0.05)
            except AssertionError as error:
                self.errors.append(error)

    def wait_for(self, factor):
        """Until the last answer of every client had this factor."""
        last = lambda: {tuple(each[-1:]) for each in self.factors}  # noqa: E731
        self.server.wait_for(lambda: last() == {(factor,)} or self.errors)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors[0]
        assert any(self.factors)


def test_hot_reload_under_load(folder, templates):
    with serving(folder) as server, Load(server) as load:
        load.wait_for(factor_of(1))
        shutil.copytree(templates[0], folder / ".partial-9")
        new_version(templates, folder, 2)
        server.wait_for(lambda: server.status().get("2", {}).get("state") == "AVAILABLE")
        server.wait_for(lambda: server.status()["1"]["state"] == "END")
        load.wait_for(factor_of(2))
        assert server.metric('he_keras_model_version{model="pixels"}') == 2
        old = server.predict({"inputs": [1.0]}, "/v1/models/pixels/versions/1:predict")
        assert old.status_code == 404
    # The old version, then the new one, and never the old one again.
    assert factor_of(1) < factor_of(2)
    for factors in load.factors:
        assert set(factors) == {factor_of(1), factor_of(2)} and factors == sorted(factors)


def test_broken_versions_are_reported_and_the_old_one_serves_on(folder, templates):
    with serving(folder) as server, Load(server) as load:
        new_version(templates, folder, 2)
        variables = next((templates[0] / "variables").glob("*.data*")).name
        broken = folder / ".3"
        shutil.copytree(templates[2], broken)
        (broken / "variables" / variables).write_bytes(b"short")
        broken.rename(folder / "3")
        (folder / "4").mkdir()
        (folder / ".5").mkdir()
        (folder / ".5" / "saved_model.pb").write_bytes(b"no model")
        (folder / ".5").rename(folder / "5")
        failed = 'he_keras_model_loads_total{model="pixels",result="failed"}'
        server.wait_for(lambda: server.metric(failed) == 3)
        server.wait_for(lambda: server.status().get("2", {}).get("state") == "AVAILABLE")
        time.sleep(0.5)
        assert server.metric(failed) == 3, "tried again though nothing changed"
        for version in "345":
            status = server.status()[version]
            assert status["state"] == "END"
            assert status["status"]["error_code"] == "UNKNOWN" and status["status"]["error_message"]
        # Written file by file, without a rename: served once it is complete.
        shutil.copytree(templates[factor_of(5) - 1], folder / "5", dirs_exist_ok=True)
        server.wait_for(lambda: server.status()["5"]["state"] == "AVAILABLE")
        shutil.rmtree(folder / "5")
        shutil.rmtree(folder / "4")
        server.wait_for(lambda: server.status().get("2", {}).get("state") == "AVAILABLE")
        # At once: while it is emptied, version 1 may be the newest for a moment.
        folder.rename(folder.with_name("gone"))
        time.sleep(0.5)
        load.stopping.set()
        assert answered_factor(server.predict({"inputs": IMAGES.tolist()})) == factor_of(2)
        assert server.log().count("Cannot load version 3 of pixels") == 1


def test_versions_that_come_and_go_leave_no_memory_behind(folder, templates):
    def reload(server, version):
        new_version(templates, folder, version)
        server.wait_for(lambda: server.status().get(str(version), {}).get("state") == "AVAILABLE")
        assert answered_factor(server.predict({"inputs": IMAGES.tolist()})) == factor_of(version)
        server.wait_for(lambda: server.status()[str(version - 1)]["state"] == "END")
        shutil.rmtree(folder / str(version - 1))

    with serving(folder) as server:
        for version in range(2, 5):
            reload(server, version)
        before = server.memory_mib()
        for version in range(5, 11):
            reload(server, version)
        assert server.memory_mib() - before < 40
        server.wait_for(lambda: server.status().keys() == {"10"})


def kill_clients(server, count):
    """Starts clients that wait for a slow answer, and kills them."""
    program = (
        "import sys, urllib.request; print('asking', flush=True);"
        "urllib.request.urlopen(sys.argv[1], sys.argv[2].encode())"
    )
    body = json.dumps({"signature_name": "slow", "inputs": [1.0]})
    rng = random.Random(0)
    for _ in range(count):
        command = [sys.executable, "-S", "-c", program, f"{server.url}/v1/models/pixels:predict"]
        client = subprocess.Popen([*command, body], stdout=subprocess.PIPE)
        client.stdout.readline()
        time.sleep(rng.random() / 2)
        client.kill()
        client.communicate()


def ask_slowly(server, answers):
    answers.append(server.predict({"signature_name": "slow", "inputs": [1.0]}).json())


def slow_requests_in_flight(server, answers):
    """Returns threads that wait for slow answers, of which at least two are in the queue."""
    for _ in range(20):
        threads = [threading.Thread(target=ask_slowly, args=[server, answers]) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if server.metric("he_keras_queue_examples") >= 2:
                return threads
    raise AssertionError("the answers came before anybody could look")


def test_clients_are_killed_and_a_signal_lets_requests_in_flight_finish(folder):
    with serving(folder) as server:
        kill_clients(server, 5)
        assert answered_factor(server.predict({"inputs": IMAGES.tolist()})) == factor_of(1)
        server.wait_for(lambda: server.metric("he_keras_queue_examples") == 0)
        answers = []
        threads = slow_requests_in_flight(server, answers)
        idle = socket.create_connection(("127.0.0.1", server.port))
        code, _, log = server.stop()
        for thread in threads:
            thread.join()
        idle.close()
    assert len(answers) % 3 == 0 and answers == [{"outputs": [0.5]}] * len(answers)
    assert code == 0
    assert "Traceback" not in log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_killed_at_five_moments_it_comes_back_with_the_same_answers(folder, templates):
    """Kills fall into loading, serving and reloading; the port is the same every time."""
    rng = random.Random(1)
    version, start_seconds = 1, None
    with serving(folder) as server:
        port = server.port
    with Load(server, may_fail=True):
        for kill in range(NUM_KILLS):
            running = Program(serve_pixels, folder, port)
            began = time.monotonic()
            version += 1
            new_version(templates, folder, version)
            if kill % 2 == 0:
                wait_until_ready(server)
                start_seconds = time.monotonic() - began
                version += 1
                new_version(templates, folder, version)
                time.sleep(rng.random())
            else:
                time.sleep(rng.uniform(0, 1.5 * start_seconds))
            running.kill()
            running.wait()
    with serving(folder, port=port) as server:
        assert answered_factor(server.predict({"inputs": IMAGES.tolist()})) == factor_of(version)
        assert server.status()[str(version)]["state"] == "AVAILABLE"


def wait_until_ready(server):
    def is_ready():
        try:
            return requests.get(f"{server.url}/readyz", timeout=5).status_code == 200
        except requests.exceptions.RequestException:
            return False

    server.wait_for(is_ready)
