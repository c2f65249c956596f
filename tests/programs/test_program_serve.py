"""`tools/serve.py`: its errors, which end in one line, and its start and end."""

import logging
import signal
import socket
import sys

import pytest
from programs import assert_one_line_error, run_here
from served_models import random_images, running_server, save_model


@pytest.fixture(autouse=True)
def restored_logger():
    logger = logging.getLogger("he_keras.serving")
    yield
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def serve(monkeypatch, capfd, *arguments):
    return run_here(monkeypatch, capfd, "serve", *arguments)


def test_a_model_is_needed(monkeypatch, capfd):
    assert_one_line_error(serve(monkeypatch, capfd), "expected --model_dir=FOLDER or NAME=FOLDER")


def test_folders_that_hold_no_model(monkeypatch, capfd, tmp_path):
    missing = serve(monkeypatch, capfd, f"--model_dir={tmp_path}/none", "--port=0")
    assert_one_line_error(missing, "expected a folder of versions", "none: No such file")
    (tmp_path / "file").touch()
    file = serve(monkeypatch, capfd, f"--model_dir={tmp_path}/file", "--port=0")
    assert_one_line_error(file, "file: Not a directory")
    (tmp_path / "empty").mkdir()
    empty = serve(monkeypatch, capfd, f"--model_dir={tmp_path}/empty", "--port=0")
    assert_one_line_error(empty, "expected a version of empty that loads; received none")
    (tmp_path / "one" / "1").mkdir(parents=True)
    (tmp_path / "one" / "1" / "saved_model.pb").write_bytes(b"no model")
    version = serve(monkeypatch, capfd, f"--model_dir={tmp_path}/one/1", "--port=0")
    assert_one_line_error(version, "expected its parent folder")


def test_names_of_models(monkeypatch, capfd, tmp_path):
    twice = [f"--model_dir=a={tmp_path}", f"--model_dir=a={tmp_path}"]
    assert_one_line_error(serve(monkeypatch, capfd, *twice), "received a twice")
    slash = serve(monkeypatch, capfd, f"--model_dir=a/b={tmp_path}")
    assert_one_line_error(slash, "expected no slash and no colon; received 'a/b'")


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--max_batch_size=0", "max_batch_size=0"),
        ("--port=100000", "expected 0 to 65535"),
        ("--max_queue=3", "max_queue >= 32"),
        ("--timeout_seconds=-1", "timeout_seconds=-1"),
        ("--port=x", "x"),
        ("--no_such_flag=1", "no_such_flag"),
    ],
)
def test_wrong_flags(monkeypatch, capfd, tmp_path, flag, part):
    assert_one_line_error(serve(monkeypatch, capfd, f"--model_dir={tmp_path}", flag), part)


def test_a_taken_port_and_a_host_that_is_none(monkeypatch, capfd, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = serve(monkeypatch, capfd, f"--model_dir={tmp_path}", f"--port={port}")
    assert_one_line_error(answer, f"received 127.0.0.1:{port}: Address already in use")
    wrong = serve(monkeypatch, capfd, f"--model_dir={tmp_path}", "--host=999.0.0.1", "--port=0")
    assert_one_line_error(wrong, "999.0.0.1")


def test_a_damaged_model(monkeypatch, capfd, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"no model")
    answer = serve(monkeypatch, capfd, f"--model_dir=m={tmp_path}", "--port=0")
    assert_one_line_error(answer, "expected a version of m that loads; received 1: Cannot parse")


@pytest.mark.parametrize("library", ["aiohttp", "orjson", "prometheus_client", "simdjson"])
def test_a_missing_library(monkeypatch, capfd, tmp_path, library):
    monkeypatch.setitem(sys.modules, library, None)
    answer = serve(monkeypatch, capfd, f"--model_dir={tmp_path}", "--port=0")
    assert_one_line_error(answer, "pip install he_keras[serve]")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_code_0(tmp_path):
    save_model(tmp_path / "pixels" / "3")
    with running_server(f"--model_dir={tmp_path}/pixels") as server:
        assert server.first_line.startswith("Serving pixels (version 3) at http://127.0.0.1:")
        answer = server.predict({"instances": random_images(1).tolist()})
        assert answer.status_code == 200
        code, out, err = server.stop(signal.SIGINT)
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    assert "Serving version 3 of pixels" in err and "Stopping" in err
