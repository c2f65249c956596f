"""TensorFlow Serving's rules for JSON: tensors, rows and columns, bytes, NaN; limits of images."""

import base64
import io
import json
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from he_keras.serving import image_size, number_arrays, predict_format, tensors
from he_keras.serving.request_error import RequestError, shown

FLOATS = {"x": tf.TensorSpec([None, 2], tf.float32, "x")}
PAIR = {"a": tf.TensorSpec([None], tf.int32, "a"), "b": tf.TensorSpec([None, 2], tf.float32, "b")}
IMAGES = {"images": tf.TensorSpec([None], tf.string, "images")}


def parse(text, inputs=FLOATS):
    body = text if isinstance(text, bytes) else text.encode()
    return predict_format.parse_request(body, lambda name: inputs)


def refusal(function, *arguments, status=400):
    with pytest.raises(RequestError) as caught:
        function(*arguments)
    assert caught.value.status == status
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (tf.float32, [1, 2.5, -3e2], [1, 2.5, -300]),
        (tf.float32, [2**24 - 1], [2**24 - 1]),
        (tf.float32, [1e10], [1e10]),
        (tf.float32, [float("nan"), float("-inf")], [np.nan, -np.inf]),
        (tf.float64, [2**53 - 1], [2**53 - 1]),
        (tf.float16, [0.5], [0.5]),
        (tf.bfloat16, [0.5], [0.5]),
        (tf.uint8, [0, 255], [0, 255]),
        (tf.int64, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        (tf.uint64, [2**64 - 1], [2**64 - 1]),
        (tf.bool, [True, False], [True, False]),
        (tf.string, ["a", {"b64": "/w=="}, {"b64": "/w"}], [b"a", b"\xff", b"\xff"]),
    ],
)
def test_values_of_each_type(dtype, value, expected):
    array = tensors.to_array(value, tf.TensorSpec([None], dtype, "x"))
    assert array.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(array, np.array(expected, dtype.as_numpy_dtype))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (tf.float32, [True]),
        (tf.float32, ["1"]),
        (tf.float32, [None]),
        (tf.float32, [1, [2]]),
        (tf.float32, [{"b64": "aa=="}]),
        (tf.float32, [2**24]),
        (tf.float32, [0.5, -(2**24)]),
        (tf.float32, [float("nan"), 2**24]),
        (tf.float32, [1e39]),
        (tf.float32, [float("inf"), -1e39]),
        (tf.float32, [10**400]),
        (tf.float64, [2**53]),
        (tf.float16, [1e6]),
        (tf.uint8, [256]),
        (tf.uint8, [-1]),
        (tf.uint8, [1.0]),
        (tf.uint8, [True]),
        (tf.int64, [2**63]),
        (tf.uint64, [-1]),
        (tf.uint64, [2**64]),
        (tf.bool, [1]),
        (tf.string, [1]),
        (tf.string, [{"b64": "a"}]),
        (tf.string, [{"b64": "ab-_cd"}]),
        (tf.string, [{"b64": "aa==", "x": 1}]),
        (tf.string, [{"b64": 1}]),
        (tf.complex64, [1.0]),
    ],
)
def test_wrong_values_of_each_type(dtype, value):
    assert refusal(tensors.to_array, value, tf.TensorSpec([None], dtype, "x"))


@pytest.mark.parametrize(
    "value",
    [[[1, 2], [3]], [[1, 2], 3], [[[1, 2]], [3, 4]], [[[1], [2]], [[3], [4, 5]]]],
)
def test_ragged_lists(value):
    assert "Ragged" in refusal(tensors.to_array, value, tf.TensorSpec(None, tf.float32, "x"))


@pytest.mark.parametrize("value", [[1, 2], [[1, 2, 3]], [[[1, 2]]], 1, []])
def test_shapes_that_the_signature_does_not_take(value):
    assert "Shape of input x" in refusal(tensors.to_array, value, FLOATS["x"])


def test_rows_of_one_input_and_of_several():
    np.testing.assert_array_equal(parse('{"instances": [[1, 2]]}').arrays["x"], [[1, 2]])
    np.testing.assert_array_equal(parse('{"instances": [{"x": [1, 2]}]}').arrays["x"], [[1, 2]])
    both = parse('{"instances": [{"a": 1, "b": [2, 3]}, {"b": [5, 6], "a": 4}]}', PAIR)
    assert both.in_rows
    np.testing.assert_array_equal(both.arrays["a"], [1, 4])
    np.testing.assert_array_equal(both.arrays["b"], [[2, 3], [5, 6]])


def test_columns_of_one_input_and_of_several():
    assert not parse('{"inputs": [[1, 2]]}').in_rows
    np.testing.assert_array_equal(parse('{"inputs": {"x": [[1, 2]]}}').arrays["x"], [[1, 2]])
    both = parse('{"inputs": {"a": [1, 4], "b": [[2, 3], [5, 6]], "more": 0}}', PAIR)
    np.testing.assert_array_equal(both.arrays["b"], [[2, 3], [5, 6]])
    scalar = {"s": tf.TensorSpec([], tf.string, "s")}
    assert parse('{"inputs": {"b64": "aGk="}}', scalar).arrays["s"][()] == b"hi"
    assert list(parse('{"instances": [{"b64": "aGk="}, "ho"]}', IMAGES).arrays["images"]) == [
        b"hi",
        b"ho",
    ]


@pytest.mark.parametrize(
    ("text", "inputs", "part"),
    [
        ("", FLOATS, "JSON parse error"),
        ('{"instances": [[1, 2]', FLOATS, "JSON parse error"),
        ('{"instances": [[NaN, 2]', FLOATS, "JSON parse error"),
        ("[" * 100_000, FLOATS, "JSON parse error"),
        ('{"a": NaN, "b": ' + "[" * 100_000, FLOATS, "JSON parse error"),
        (b'{"instances": "\xff"}', FLOATS, "JSON parse error"),
        ("[1]", FLOATS, "not an object"),
        ("{}", FLOATS, "exactly one of the keys"),
        ('{"instances": [[1, 2]], "inputs": [[1, 2]]}', FLOATS, "exactly one of the keys"),
        ('{"instances": []}', FLOATS, "at least one"),
        ('{"instances": {"x": 1}}', FLOATS, "to be a list"),
        ('{"instances": [[1, 2]], "signature_name": 3}', FLOATS, "'signature_name'"),
        ('{"instances": [[1, 2]], "signature_name": null}', FLOATS, "'signature_name'"),
        ('{"instances": [1, 2]}', PAIR, "objects with keys a, b"),
        ('{"instances": [{"a": 1}]}', PAIR, "element 0 of 'instances' to have the keys a, b"),
        ('{"instances": [{"a": 1, "b": [1, 2], "c": 1}]}', PAIR, "keys a, b"),
        ('{"instances": [{"a": 1, "b": [1, 2]}, 5]}', PAIR, "element 1"),
        ('{"instances": [[1, 2], {"x": [1, 2]}]}', FLOATS, "mixes"),
        ('{"inputs": [1]}', PAIR, "an object with keys a, b"),
        ('{"inputs": {"a": [1]}}', PAIR, "Missing named input: b"),
    ],
)
def test_bodies_that_are_refused(text, inputs, part):
    assert part in refusal(parse, text, inputs)


def test_nan_and_infinity_are_numbers_both_ways():
    array = parse('{"instances": [[NaN, -Infinity]]}').arrays["x"]
    np.testing.assert_array_equal(array, [[np.nan, -np.inf]])
    answer = predict_format.format_answer({"x": np.float32([[np.nan, 0.1], [np.inf, 2]])}, False)
    assert answer == b'{"outputs": [[NaN, 0.1], [Infinity, 2.0]]}'


def test_answers_in_rows_and_columns():
    outputs = {
        "y": np.float32([0.1, 1]),
        "n": np.int64([1, 2]),
        "labels": np.array([b"cat", "h\u00e9".encode()], object),
        "z_bytes": np.array([b"\xff", b"\x00"], object),
    }
    rows = json.loads(predict_format.format_answer(outputs, True))["predictions"]
    assert rows == [
        {"y": 0.1, "n": 1, "labels": "cat", "z_bytes": {"b64": "/w=="}},
        {"y": 1.0, "n": 2, "labels": "h\u00e9", "z_bytes": {"b64": "AA=="}},
    ]
    columns = json.loads(predict_format.format_answer(outputs, False))["outputs"]
    assert columns["y"] == [0.1, 1.0] and columns["z_bytes"][1] == {"b64": "AA=="}
    lone = {"y": outputs["y"]}
    assert predict_format.format_answer(lone, True) == b'{"predictions":[0.1,1.0]}'
    assert predict_format.format_answer(lone, False) == b'{"outputs":[0.1,1.0]}'


def test_rows_need_one_value_for_each():
    scalar = {"y": np.float32(1)}
    assert "batch size" in refusal(predict_format.format_answer, scalar, True)
    assert predict_format.format_answer(scalar, False) == b'{"outputs":1.0}'
    uneven = {"y": np.float32([1]), "z": np.float32([1, 2])}
    assert "batch size" in refusal(predict_format.format_answer, uneven, True)


def fast(text, spec):
    return number_arrays.parse_plain_numbers(text.encode(), lambda name: {"x": spec})


@pytest.mark.parametrize("dtype", [tf.float32, tf.uint8, tf.int32])
def test_the_fast_way_gives_what_the_general_way_gives(dtype):
    spec = tf.TensorSpec([None, 3, 2], dtype, "x")
    values = np.random.RandomState(0).randint(0, 255, (5, 3, 2))
    values = {tf.float32: values / 7, tf.uint8: values, tf.int32: -values}[dtype]
    text = json.dumps({"signature_name": "s", "instances": values.tolist()}, indent=1)
    name, arrays, in_rows = fast(text, spec)
    assert (name, in_rows) == ("s", True)
    general = tensors.to_array(values.tolist(), spec)
    assert arrays["x"].dtype == general.dtype
    np.testing.assert_array_equal(arrays["x"], general)


@pytest.mark.parametrize(
    "values",
    [
        "[[1, 2, 3], [4]]",
        "[[1], [2, 3, 4]]",
        "[1, 2, 3, 4]",
        "[[[1, 2], [3, 4]]]",
        "[[1, 2], [3, true]]",
        '[[1, 2], [3, "4"]]',
        "[[1, 2], [3, null]]",
        "[[1, 2], [3, NaN]]",
        "[[16777216, 2]]",
        "[[1e39, 2]]",
        "[]",
        "3",
        '[{"x": [1, 2]}]',
    ],
)
def test_the_fast_way_leaves_the_unusual_to_the_general_way(values):
    spec = tf.TensorSpec([None, 2], tf.float32, "x")
    assert fast(f'{{"instances": {values}}}', spec) is None
    assert fast('{"instances": [[1, 2], [3, 4]]}', spec)


def test_large_and_small_bodies_are_parsed_alike():
    space = " " * 3000
    for text in ('{"instances": [[1, 2]]%s}', '{"instances": [[1, NaN]]%s}'):
        small, large = (parse(text % padding).arrays["x"] for padding in ("", space))
        np.testing.assert_array_equal(small, large)
    assert "Ragged" in refusal(parse, '{"instances": [[1, 2, 3], [1]]' + space + "}")


def png_header(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + header + b"\x00" * 4


def check(data, max_pixels=100):
    arrays = {"images": np.array([data, data], object)}
    return image_size.checked_pixels(arrays, IMAGES, max_pixels, 2 * max_pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_pixels_are_counted_before_decoding(kind):
    file = io.BytesIO()
    Image.new("RGB", (10, 10)).save(file, kind)
    assert check(file.getvalue()) == 200
    assert "10 x 10 pixels" in refusal(check, file.getvalue(), 99)


@pytest.mark.parametrize(
    "data",
    [
        png_header(50_000, 50_000),
        png_header(0, 5),
        png_header(2**31, 2**31),
        png_header(5, 5)[:20],
        b"",
        b"GIF89a" + b"\x00" * 20,
        b"BM" + b"\x00" * 60,
        b"\xff\xd8\xff",
        b"hello",
    ],
)
def test_bombs_and_other_formats(data):
    assert refusal(check, data)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP"])
def test_whole_images_of_other_formats(kind):
    file = io.BytesIO()
    Image.new("RGB", (5, 5)).save(file, kind)
    assert "neither a PNG nor a JPEG" in refusal(check, file.getvalue())


def test_strings_of_other_names_are_no_images():
    inputs = {"text": tf.TensorSpec([None], tf.string, "text")}
    assert image_size.checked_pixels({"text": np.array([b"hello"], object)}, inputs, 1, 1) == 0
    assert not image_size.is_image_input(inputs["text"])
    assert not image_size.is_image_input(tf.TensorSpec([None], tf.uint8, "images"))


def test_messages_stay_short():
    assert len(shown("x" * 10**6)) == 80
    message = refusal(parse, json.dumps({"instances": [["y" * 10**5, 1]]}))
    assert len(message) < 300
    assert base64.b64encode(b"yyyyyy").decode() not in message
