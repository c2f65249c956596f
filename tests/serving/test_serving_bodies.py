"""Bodies that would cost a server much: packed, of millions of values, nested without end."""

import gzip
import json
import zlib

import pytest
import requests
import tensorflow as tf
from aiohttp import http_parser
from stand_in_server import GOOD, PATH, HeldSignature, Running

from he_keras.serving import application, request_body


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS = [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]


def send_packed(server, encoding, body):
    headers = {"Content-Encoding": encoding}
    return requests.post(server.url + PATH, data=body, headers=headers, timeout=60)


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
def test_packed_bodies(running, encoding, pack):
    body = json.dumps(GOOD).encode()
    assert send_packed(running, encoding, pack(body)).json() == {"predictions": [2.0, 4.0]}
    for broken in (pack(body)[:-3], pack(body) + b"more", body):
        answer = send_packed(running, encoding, broken)
        assert answer.status_code == 400 and "badly packed" in answer.json()["error"]
    assert send_packed(running, "br", body).status_code == 400
    assert send_packed(running, f"{encoding}, {encoding}", pack(pack(body))).status_code == 400


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
def test_what_is_refused_is_not_unpacked_further(monkeypatch, encoding, pack):
    """The library unpacked all of a refused bomb, for seconds, to throw it away."""
    produced = []
    packed = request_body._Packed
    unpack = packed.unpack

    def counted(self, data, limit):
        produced.append(len(part := unpack(self, data, limit)))
        return part

    monkeypatch.setattr(packed, "unpack", counted)
    monkeypatch.setattr(http_parser.DeflateBuffer, "feed_data", lambda *_: pytest.fail("unpacked"))
    with Running(max_body_bytes=20_000) as server:
        answer = send_packed(server, encoding, pack(b" " * 10**7))
        assert answer.status_code == 413
        assert server.predict(GOOD).status_code == 200
    assert sum(produced) == 20_001


@pytest.mark.parametrize("value", [b"0", b"[]", b"NaN", b'"a"', b'{"x": 1}'])
def test_far_too_many_values_are_refused_unparsed(running, monkeypatch, value):
    monkeypatch.setattr(application, "parse_request", lambda *_: pytest.fail("parsed"))
    body = b'{"instances": [' + b",".join([value] * 10_000) + b"]}"
    answer = requests.post(running.url + PATH, data=body, timeout=60)
    assert answer.status_code == 413 and "expected at most 64" in answer.json()["error"]


def test_a_few_too_many_values_are_told_how_many_examples(running):
    answer = running.predict({"instances": [0.0] * 1000})
    assert answer.status_code == 400 and "at most 32 examples; received 1000" in answer.text


@pytest.mark.parametrize(
    ("shape", "dtype", "name", "values"),
    [
        ([None, 2, 3], tf.float32, "x", 4 * 6 + 4),
        ([None], tf.string, "images", 4 + 4),
        ([None], tf.string, "text", None),
        ([None, None, 3], tf.float32, "x", None),
        (None, tf.float32, "x", None),
        ([], tf.float32, "x", 1 + 4),
    ],
)
def test_the_values_that_a_signature_takes(shape, dtype, name, values):
    signature = HeldSignature(tf.TensorSpec(shape, dtype, name))
    assert signature.num_values(4) == values


@pytest.mark.parametrize("depth", [10, 300, 900, 990, 1000, 1010, 1023, 1024, 5000])
@pytest.mark.parametrize("leaf", [b"1", b"NaN"])
@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_nested_json_is_a_mistake_of_the_client(running, depth, opening, closing, leaf):
    body = b'{"instances": [' + opening * depth + leaf + closing * depth + b"]}"
    answer = requests.post(running.url + PATH, data=body, timeout=60)
    assert answer.status_code == 400 and len(answer.text) < 2000


@pytest.fixture(scope="module")
def running():
    with Running() as server:
        yield server
