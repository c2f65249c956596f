"""The bodies of predict requests and answers, in rows ("instances") or columns ("inputs")."""

import json
from typing import NamedTuple

import numpy as np

from he_keras.serving.number_arrays import parse_plain_numbers
from he_keras.serving.request_error import RequestError, shown
from he_keras.serving.tensors import is_bytes_object, to_array, to_json_values

DEFAULT_SIGNATURE = "serving_default"
#: For a shorter body, the general parser is as fast. Chosen, not measured to the byte.
_FEW_BYTES = 1024


class PredictRequest(NamedTuple):
    """A parsed body.

    Attributes:
        signature_name: the signature that the request asks for.
        arrays: a value for each input of that signature.
        in_rows: whether the request came in rows. Then it is answered in rows.
    """

    signature_name: str
    arrays: dict[str, np.ndarray]
    in_rows: bool


def parse_request(body: bytes, inputs_of) -> PredictRequest:
    """Parses the body of a predict request.

    Args:
        body: JSON. As in TensorFlow Serving, `NaN`, `Infinity` and `-Infinity` are numbers too.
        inputs_of: a function from the name of a signature to its inputs.

    Raises:
        RequestError: 400 for every mistake in the body.

    Example:
        >>> import tensorflow as tf
        >>> inputs = {"x": tf.TensorSpec([None], tf.float32, "x")}
        >>> parse_request(b'{"instances": [1.0, 2.0]}', lambda name: inputs).arrays["x"]
        array([1., 2.], dtype=float32)
    """
    named = lambda name: inputs_of(name or DEFAULT_SIGNATURE)  # noqa: E731
    numbers = None
    if len(body) > _FEW_BYTES and b'"b64"' not in body[:_FEW_BYTES]:
        numbers = parse_plain_numbers(body, named)
    if numbers is None:
        numbers = _parse_any(body, named)
    signature_name, arrays, in_rows = numbers
    return PredictRequest(signature_name or DEFAULT_SIGNATURE, arrays, in_rows)


def _parse_any(body: bytes, inputs_of) -> tuple[str, dict[str, np.ndarray], bool]:
    document = parse_json(body)
    if not isinstance(document, dict):
        raise RequestError(400, f"JSON value {shown(document)} is not an object")
    signature_name = document.get("signature_name", "")
    if not isinstance(signature_name, str):
        raise RequestError(400, "'signature_name' must be a string")
    inputs = inputs_of(signature_name)
    in_rows = "instances" in document
    if in_rows == ("inputs" in document):
        raise RequestError(400, "Expected exactly one of the keys 'instances' and 'inputs'")
    if in_rows:
        values = _from_rows(document["instances"], inputs)
    else:
        values = _from_columns(document["inputs"], inputs)
    arrays = {name: to_array(values[name], spec) for name, spec in inputs.items()}
    return signature_name, arrays, in_rows


def parse_json(body: bytes):
    """Parses JSON. The fast parser knows no NaN, so bodies with NaN go to Python's own parser."""
    import orjson

    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if b"NaN" not in body and b"Infinity" not in body:
            raise RequestError(400, f"JSON parse error: {error}") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"JSON parse error: {error}") from error


def _from_rows(instances, inputs: dict) -> dict:
    if not isinstance(instances, list) or not instances:
        raise RequestError(400, "Expected 'instances' to be a list of at least one value")
    are_objects = [isinstance(each, dict) and not is_bytes_object(each) for each in instances]
    if not are_objects[0]:
        if len(inputs) > 1:
            raise RequestError(400, f"Expected 'instances' to be objects with keys {_keys(inputs)}")
        if any(are_objects):
            raise RequestError(400, "'instances' mixes objects with values")
        return {next(iter(inputs)): instances}
    for index, each in enumerate(instances):
        if not are_objects[index] or each.keys() != inputs.keys():
            raise RequestError(
                400, f"Expected element {index} of 'instances' to have the keys {_keys(inputs)}"
            )
    return {name: [each[name] for each in instances] for name in inputs}


def _from_columns(columns, inputs: dict) -> dict:
    if not isinstance(columns, dict) or is_bytes_object(columns):
        if len(inputs) > 1:
            raise RequestError(400, f"Expected 'inputs' to be an object with keys {_keys(inputs)}")
        return {next(iter(inputs)): columns}
    missing = [name for name in inputs if name not in columns]
    if missing:
        raise RequestError(400, f"Missing named input: {missing[0]} in 'inputs'")
    return columns


def _keys(inputs: dict) -> str:
    return ", ".join(sorted(inputs))


def format_answer(outputs: dict[str, np.ndarray], in_rows: bool) -> bytes:
    """Writes outputs as JSON. A single output is written without its name.

    Raises:
        RequestError: 400 if rows are asked for and the outputs do not have one value for each row.

    Example:
        >>> format_answer({"y": np.float32([0.1, np.nan])}, in_rows=True)
        b'{"predictions": [0.1, NaN]}'
    """
    if in_rows and len({array.shape[:1] for array in outputs.values()} | {()}) != 2:
        raise RequestError(400, "The outputs differ in batch size; use 'inputs' for this signature")
    if all(np.isfinite(each).all() for each in outputs.values() if each.dtype.kind == "f"):
        return _write(outputs, in_rows)
    # Strict JSON has neither NaN nor infinity. This slow way is for the rare answers with them.
    # It goes through text, because a float32 that is printed as a double shows more digits than
    # it has.
    plain = {
        name: array.astype(np.str_).astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in outputs.items()
    }
    lists = {name: to_json_values(name, array) for name, array in plain.items()}
    document = _arranged(lists, in_rows)
    return json.dumps(document, default=lambda array: array.tolist()).encode()


def _write(outputs: dict, in_rows: bool) -> bytes:
    import orjson

    values = {name: to_json_values(name, array) for name, array in outputs.items()}
    return orjson.dumps(_arranged(values, in_rows), option=orjson.OPT_SERIALIZE_NUMPY)


def _arranged(values: dict, in_rows: bool) -> dict:
    key = "predictions" if in_rows else "outputs"
    if len(values) == 1:
        return {key: next(iter(values.values()))}
    if not in_rows:
        return {key: values}
    rows = zip(*values.values(), strict=True)
    return {key: [dict(zip(values, row, strict=True)) for row in rows]}
