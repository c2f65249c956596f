"""500 malformed and hostile requests: each is refused, nothing leaks, answers stay right."""

import base64
import json
import random
import socket
import struct
import zlib

import numpy as np
import pytest
import requests
from served_models import encoded_png, random_images, running_server, save_model

pytestmark = pytest.mark.slow
PATH = "/v1/models/pixels:predict"
MAX_BODY = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("models") / "pixels" / "1").parent
    limits = ["--timeout_seconds=2", f"--max_body_bytes={MAX_BODY}", "--max_image_pixels=10000"]
    with running_server(f"--model_dir={folder}", *limits) as server:
        yield server


def good_body():
    return json.dumps({"instances": random_images(2).tolist()}).encode()


def truncated(rng):
    body = good_body()
    return body[: rng.randrange(len(body))]


def mutated(rng):
    """One byte of the structure replaced by one that cannot stand there."""
    body = bytearray(good_body())
    place = rng.choice([index for index, byte in enumerate(body) if byte in b"[]{}:"])
    body[place] = rng.choice(b"!x(\x00\xff")
    return bytes(body)


def nested(rng):
    depth = rng.choice([50, 2000, 200_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opening * depth + b"1" + closing * depth
    return b'{"instances": ' + inner[: MAX_BODY - 100] + b"}"


def wrong_types(rng):
    value = rng.choice([None, True, "text", {}, {"b64": 3}, {"images": None}, [[None]], 7, -1.5])
    key = rng.choice(["instances", "inputs", "signature_name"])
    return json.dumps({"instances": [[[[0.0]]]], key: value}).encode()


def huge_numbers(rng):
    number = rng.choice(["1e400", "-1e39", "9" * 5000, "123456789" * 5, "1" + "0" * 30])
    pixels = ",".join(["[0]", "[0]", f"[{number}]"])
    return f'{{"instances": [[[{pixels}], [[0],[0],[0]]]]}}'.encode()


def huge_batch(rng):
    rows = rng.choice([33, 1000, 5000])
    return json.dumps({"instances": random_images(1).tolist() * rows}).encode()


def ragged(rng):
    images = random_images(3).tolist()
    row = rng.choice(images)
    rng.choice([row, rng.choice(row)]).append(rng.choice([0.5, [0.5], [[0.5]]]))
    return json.dumps({"instances": images}).encode()


def wrong_bytes(rng):
    """Images that are none, are cut off, or are bombs."""
    text = rng.choice(["", "!!!", "a", base64.b64encode(bomb(rng)).decode(), "aGVsbG8="])
    cut = encoded_png(np.zeros((5, 5, 1)))[: rng.randrange(24, 40)]
    text = rng.choice([text, base64.b64encode(cut).decode()])
    document = {"signature_name": "serve_bytes", "instances": [{"b64": text}]}
    return json.dumps(document).encode()


def bomb(rng):
    """A few hundred bytes that claim, or unpack to, billions of pixels."""
    side = rng.choice([20_000, 60_000, 2**31 - 1])

    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 200_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


def wrong_encoding(rng):
    return rng.choice([good_body().decode().encode("utf-16"), b"\xff\xfe", b"\x00" * 100, b""])


def wrong_signature(rng):
    name = rng.choice(["none", "../serve", "x" * 10_000, "\u0000", "__saved_model_init_op"])
    return json.dumps({"signature_name": name, "instances": [1.0]}).encode()


BODIES = (
    truncated,
    mutated,
    nested,
    wrong_types,
    huge_numbers,
    huge_batch,
    ragged,
    wrong_bytes,
    wrong_encoding,
    wrong_signature,
)


def wrong_path(rng):
    return rng.choice(
        [
            "/v1/models/../../etc/passwd:predict",
            "/v1/models/..%2f..%2fetc:predict",
            "/v1/models/%00:predict",
            "/v1/models/%ff%fe:predict",
            f"/v1/models/{'a' * 4000}:predict",
            f"/v1/models/pixels/versions/{'9' * 3000}:predict",
            "/v1/models/pixels/versions/-1:predict",
            "/v1/models/pixels/versions/1.5:predict",
            "/v1/models/pixels/versions/\u0661:predict",
            "/v1/models//:predict",
            "/v1/models/pixels:predict/",
            "/v1//models/pixels:predict",
            "/v2/models/pixels:predict",
            "/v1/models/pixels/versions/1/labels/a:predict",
        ]
    )


def wrong_request(server, rng):
    """Returns the status of a request with a wrong path, method, header or size."""
    kind = rng.randrange(4)
    if kind == 0:
        request = requests.Request("POST", server.url, data=good_body()).prepare()
        request.url = server.url + wrong_path(rng)
        return requests.Session().send(request, timeout=30).status_code
    if kind == 1:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
        return requests.request(method, server.url + PATH, timeout=30).status_code
    if kind == 2:
        encoding = rng.choice(["gzip", "deflate"])
        packed = rng.choice([b"no gzip", zlib.compress(b" " * 50 * MAX_BODY), b""])
        headers = {"Content-Encoding": encoding}
        return server.predict(packed + good_body()[:10], headers=headers).status_code
    return server.predict(b" " * (MAX_BODY + rng.randrange(1, MAX_BODY))).status_code


def raw(server, data, wait=True):
    """Sends bytes over a socket and returns the start of the answer, or b"" if it was closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        try:
            client.sendall(data)
            return client.recv(100) if wait else b""
        except ConnectionError:
            return b""


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()


def broken_http(rng):
    return rng.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
            b"POST\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            HEAD + b"Content-Length: -5\r\n\r\n",
            HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n12345",
            HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
            HEAD + b"X: 1\r\n" * 20_000 + b"\r\n",
            HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
            HEAD + b"Content-Length: 2\r\n\r\n{}",
            b"\0" * 1000,
        ]
    )


def assert_right(server, reference):
    for _ in range(5):
        answer = server.predict({"instances": random_images(2).tolist()})
        # Two seconds are short on a busy machine.
        if answer.status_code not in (408, 504):
            break
    assert answer.status_code == 200
    assert answer.json() == reference


def attack(server, rng, count):
    """Sends hostile requests and returns how many of each status came back."""
    statuses = {}
    for index in range(count):
        if index % 5 < 3:
            body = BODIES[index % len(BODIES)](rng)
            answer = server.predict(body)
            status, text = answer.status_code, answer.text
            assert list(answer.json()) == ["error"], (body[:200], text[:200])
            assert len(text) < 2000
        elif index % 5 == 3:
            status, body = wrong_request(server, rng), b""
        else:
            body = broken_http(rng)
            answer = raw(server, body)
            status = int(answer.split()[1]) if answer.startswith(b"HTTP/") else 400
        assert 400 <= status < 500, (status, body[:300])
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


def test_500_hostile_requests(server):
    reference = server.predict({"instances": random_images(2).tolist()}).json()
    rng = random.Random(0)
    attack(server, rng, 250)
    assert_right(server, reference)
    before = server.memory_mib()
    statuses = attack(server, rng, 250)
    assert_right(server, reference)
    assert server.memory_mib() - before < 30
    assert {400, 404, 413} <= statuses.keys()
    assert server.process.poll() is None
    assert "Traceback" not in server.log()
    assert server.metric('he_keras_requests_total{code="500",model="pixels"}') is None
    assert server.metric('he_keras_requests_total{code="500",model=""}') is None


def test_slow_bodies_and_wrong_lengths(server):
    """A body that does not come: 408 after the time-out; meanwhile others are served."""
    reference = server.predict({"instances": random_images(2).tolist()}).json()
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(20)]
    for index, client in enumerate(slow):
        if index % 4 == 0:
            client.sendall(HEAD[: 10 + index])
        else:
            client.sendall(HEAD + b'Content-Length: 1000\r\n\r\n{"instances": [')
    assert_right(server, reference)
    for index, client in enumerate(slow):
        if index % 4:
            assert b" 408 " in client.recv(200)
        client.close()
    assert_right(server, reference)


def test_clients_that_go_away(server):
    reference = server.predict({"instances": random_images(2).tolist()}).json()
    body = good_body()
    for index in range(40):
        length = len(body) + (index % 2)
        head = HEAD + f"Content-Length: {length}\r\n\r\n".encode()
        raw(server, head + body[: len(body) - index % 3], wait=False)
    assert_right(server, reference)
    server.wait_for(lambda: server.metric("he_keras_queue_examples") == 0)


def test_large_bodies_at_once_stay_within_memory(server):
    """60 clients that announce a body and send most of it: more than may be held together."""
    before = server.memory_mib()
    part = b" " * (MAX_BODY // 2)
    address = "127.0.0.1", server.port
    clients = [socket.create_connection(address, timeout=60) for _ in range(60)]
    for client in clients:
        client.sendall(HEAD + f"Content-Length: {MAX_BODY}\r\n\r\n".encode() + part)
    statuses = [client.recv(200).split()[1] for client in clients]
    for client in clients:
        client.close()
    assert set(statuses) == {b"408", b"503"}
    assert server.memory_mib() - before < 60
