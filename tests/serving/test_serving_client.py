"""A real client of a running server: what it answers is what the SavedModel gives."""

import base64
import concurrent.futures
import gzip
import http.client
import json
import pathlib
import sys
import urllib.request

import numpy as np
import pytest
import requests
import tensorflow as tf
from programs import run_process
from served_models import (
    LABELS,
    encoded_png,
    random_images,
    running_server,
    save_model,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "pixels" / "1", factor=2.0)
    save_model(folder / "other" / "7", factor=-1.0)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    arguments = [f"--model_dir={folder}/pixels", f"--model_dir=second={folder}/other"]
    with running_server(*arguments, "--max_image_pixels=1000", "--batch_timeout_ms=20") as server:
        yield server


@pytest.fixture(scope="module")
def direct(folder):
    return tf.saved_model.load(str(folder / "pixels" / "1"))


def expected(direct, signature, **inputs):
    outputs = direct.signatures[signature](**{k: tf.constant(v) for k, v in inputs.items()})
    return {name: output.numpy() for name, output in outputs.items()}


def assert_rows(rows, outputs):
    assert len(rows) == len(outputs["logits"])
    for index, row in enumerate(rows):
        assert row.keys() == outputs.keys()
        for name in ("logits", "probabilities", "scores"):
            np.testing.assert_array_equal(np.float32(row[name]), outputs[name][index])
        assert row["classes"] == outputs["classes"][index]
        assert row["labels"].encode() == outputs["labels"][index]


def test_rows_of_floats_with_urllib(server, direct):
    images = random_images(5)
    body = json.dumps({"instances": images.tolist()}).encode()
    url = f"{server.url}/v1/models/pixels:predict"
    with urllib.request.urlopen(urllib.request.Request(url, body, method="POST")) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        rows = json.load(answer)["predictions"]
    assert_rows(rows, expected(direct, "serving_default", images=images))


def test_columns_of_floats(server, direct):
    images = random_images(3, seed=1)
    outputs = expected(direct, "serving_default", images=images)
    for inputs in (images.tolist(), {"images": images.tolist()}):
        columns = server.predict({"inputs": inputs}).json()["outputs"]
        assert columns.keys() == outputs.keys()
        np.testing.assert_array_equal(np.float32(columns["logits"]), outputs["logits"])
        assert columns["labels"] == [label.decode() for label in outputs["labels"]]


def test_saved_model_cli_gives_the_same(server, folder, tmp_path):
    images = random_images(2)
    np.save(tmp_path / "images.npy", images)
    command = [pathlib.Path(sys.executable).parent / "saved_model_cli", "run", "--overwrite"]
    command += ["--dir", folder / "pixels" / "1", "--tag_set", "serve", "--outdir", tmp_path]
    command += ["--signature_def", "serving_default"]
    answer = run_process(*command, "--inputs", f"images={tmp_path}/images.npy")
    assert answer.returncode == 0, answer.stderr
    columns = server.predict({"inputs": images.tolist()}).json()["outputs"]
    for name in ("logits", "probabilities", "classes"):
        expected_values = np.load(tmp_path / f"{name}.npy")
        np.testing.assert_array_equal(
            np.array(columns[name], expected_values.dtype), expected_values
        )


def test_integers(server, direct):
    images = np.random.RandomState(0).randint(0, 256, (4, 2, 3, 1)).astype(np.uint8)
    document = {"signature_name": "serve_uint8", "instances": images.tolist()}
    rows = server.predict(document).json()["predictions"]
    assert_rows(rows, expected(direct, "serve_uint8", images=images))
    document["instances"][0][0][0] = [0.5]
    assert server.predict(document).status_code == 400


def test_png_and_jpeg_as_base64(server, direct):
    pixels = np.random.RandomState(0).randint(0, 256, (4, 6, 1)).astype(np.uint8)
    files = [encoded_png(pixels), tf.io.encode_jpeg(pixels).numpy()]
    instances = [{"b64": base64.b64encode(file).decode()} for file in files]
    outputs = expected(direct, "serve_bytes", images=np.array(files, object))
    for body in ({"instances": instances}, {"instances": [{"images": each} for each in instances]}):
        answer = server.predict({"signature_name": "serve_bytes", **body})
        assert_rows(answer.json()["predictions"], outputs)
    columns = server.predict({"signature_name": "serve_bytes", "inputs": instances}).json()
    assert columns["outputs"]["labels"] == [label.decode() for label in outputs["labels"]]


def test_several_inputs_and_bytes_as_output(server):
    rows = [{"a": 1, "b": [2.5, 3]}, {"a": -1, "b": [0, 0]}]
    answer = server.predict({"signature_name": "pair", "instances": rows}).json()
    raw = {"b64": "/wA="}
    assert answer == {
        "predictions": [{"raw_bytes": raw, "sum": 6.5}, {"raw_bytes": raw, "sum": -1.0}]
    }
    columns = {"a": [1, -1], "b": [[2.5, 3], [0, 0]]}
    answer = server.predict({"signature_name": "pair", "inputs": columns}).json()
    assert answer == {"outputs": {"raw_bytes": [raw, raw], "sum": [6.5, -1.0]}}


def test_one_output_stands_without_its_name(server):
    answer = server.predict({"signature_name": "half", "instances": [1.0, 5]})
    assert answer.text == '{"predictions":[0.5,2.5]}'
    answer = server.predict({"signature_name": "scalar", "inputs": 3})
    assert answer.text == '{"outputs":1.5}'


def test_nan_and_infinity(server):
    body = b'{"signature_name": "half", "instances": [NaN, -Infinity, 0.2]}'
    assert server.predict(body).text == '{"predictions": [NaN, -Infinity, 0.1]}'


def test_paths_of_versions_and_models(server):
    document = {"signature_name": "half", "instances": [1.0]}
    for path in ("/v1/models/pixels/versions/1:predict", "/V1/Models/pixels:PREDICT"):
        assert server.predict(document, path).status_code == 200
    assert server.predict(document, "/v1/models/pixels:predict?x=1").status_code == 200
    images = random_images(1)
    first, second = (
        server.predict({"inputs": images.tolist()}, f"/v1/models/{name}:predict").json()["outputs"]
        for name in ("pixels", "%73econd")
    )
    np.testing.assert_allclose(first["logits"], -2 * np.array(second["logits"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "status", "part"),
    [
        ("/v1/models/none:predict", 404, "Servable not found for request: Latest(none)"),
        ("/v1/models/pixels/versions/2:predict", 404, "Specific(pixels, 2)"),
        ("/v1/models/pixels/labels/stable:predict", 400, "Unrecognized servable version label"),
        ("/v1/models/pixels:classify", 400, "Only predict is served"),
        ("/v1/models/pixels:other", 400, "Malformed request: POST"),
        ("/v1/models/pixels", 400, "Malformed request: POST"),
        ("/metrics", 405, "Malformed request: POST"),
        ("/", 404, "Not found"),
    ],
)
def test_errors_of_paths(server, path, status, part):
    answer = server.predict({"signature_name": "half", "instances": [1.0]}, path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert part in answer.json()["error"]


def test_status_and_metadata(server):
    answer = requests.get(f"{server.url}/v1/models/second/versions/7")
    assert answer.json() == {
        "model_version_status": [
            {
                "version": "7",
                "state": "AVAILABLE",
                "status": {"error_code": "OK", "error_message": ""},
            }
        ]
    }
    assert server.status("pixels").keys() == {"1"}
    assert requests.get(f"{server.url}/v1/models/second/versions/8").status_code == 404
    assert requests.get(f"{server.url}/v1/models").status_code == 400
    metadata = requests.get(f"{server.url}/v1/models/pixels/metadata").json()
    assert metadata["model_spec"] == {"name": "pixels", "signature_name": "", "version": "1"}
    signatures = metadata["metadata"]["signature_def"]["signature_def"]
    described = signatures["serving_default"]
    assert described["method_name"] == "tensorflow/serving/predict"
    assert described["inputs"]["images"]["dtype"] == "DT_FLOAT"
    assert {"serve_uint8", "serve_bytes"} < signatures.keys()
    assert described["outputs"].keys() == {"logits", "probabilities", "classes", "scores", "labels"}


def test_health_and_metrics(server):
    for path in ("/healthz", "/readyz"):
        assert requests.get(server.url + path).status_code == 200
        assert requests.head(server.url + path).status_code == 200
    before = server.metric('he_keras_requests_total{code="400",model="pixels"}') or 0
    server.predict(b"{")
    for name in ("unknown1", "unknown2"):
        server.predict(b"{", f"/v1/models/{name}:predict")
    assert server.metric('he_keras_requests_total{code="400",model="pixels"}') == before + 1
    text = requests.get(f"{server.url}/metrics").text
    assert "unknown" not in text
    assert server.metric('he_keras_model_version{model="second"}') == 7
    assert server.metric("he_keras_queue_examples") == 0


def test_compressed_bodies(server):
    body = gzip.compress(json.dumps({"signature_name": "half", "instances": [1.0]}).encode())
    answer = server.predict(body, headers={"Content-Encoding": "gzip"})
    assert answer.json() == {"predictions": [0.5]}
    broken = server.predict(body[:-4] + b"0000", headers={"Content-Encoding": "gzip"})
    assert broken.status_code == 400


def test_concurrent_clients_share_runs_and_get_their_own_answers(server, direct):
    batches = [random_images(1 + seed % 3, seed) for seed in range(60)]
    count = 'he_keras_batch_examples_count{model="pixels"}'
    before = server.metric(count) or 0  # none before the first answer
    # All are sent before any answer is read: no thread of this process has to be quick.
    clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in batches]
    for client in clients:
        client.connect()
    for client, images in zip(clients, batches, strict=True):
        body = json.dumps({"instances": images.tolist()})
        client.request("POST", "/v1/models/pixels:predict", body)
    for client, images in zip(clients, batches, strict=True):
        rows = json.load(client.getresponse())["predictions"]
        client.close()
        logits = np.float32([row["logits"] for row in rows])
        outputs = expected(direct, "serving_default", images=images)
        np.testing.assert_array_equal(logits, outputs["logits"])
        assert {row["labels"] for row in rows} <= set(LABELS)
    assert server.metric(count) - before < len(batches) / 2


def test_a_bad_image_does_not_fail_its_neighbours(server):
    good = encoded_png(np.zeros((2, 3, 1)))
    # The header is right and the rest is missing: only decoding finds out.
    bad = good[:40]

    def ask(data):
        instances = [{"b64": base64.b64encode(data).decode()}]
        return server.predict({"signature_name": "serve_bytes", "instances": instances})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [good, bad] * 8))
    assert [answer.status_code for answer in answers] == [200, 400] * 8


def test_limits_of_batch_and_image(server):
    many = server.predict({"instances": random_images(33).tolist()})
    assert many.status_code == 400
    assert "at most 32 examples; received 33" in many.json()["error"]
    large = encoded_png(np.zeros((100, 100, 1)))
    instances = [{"b64": base64.b64encode(large).decode()}]
    answer = server.predict({"signature_name": "serve_bytes", "instances": instances})
    assert answer.status_code == 400
    assert "100 x 100 pixels; expected at most 1000" in answer.json()["error"]
