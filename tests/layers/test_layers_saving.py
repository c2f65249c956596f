"""CosineHead and FeatureNorm: config and file round trips, and arguments that are refused."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from he_keras.layers import CosineHead, FeatureNorm

WHAT_EXPECTED_RECEIVED = r"[^;]+; expected [^;]+; received \w+=.+"
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]
HEADS = [dict(feature_norm=fn, weight_norm=wn) for fn, wn in SWITCHES] + [dict(angle="arc")]


@pytest.mark.parametrize("options", [*HEADS, dict(kernel_initializer="he_normal", name="top")])
def test_head_config_round_trip(options):
    head = CosineHead(5, scale=12.5, margin=0.15, **options)
    config = head.get_config()
    copy = CosineHead.from_config(config)
    assert copy.get_config() == config and copy.name == head.name
    for name in ("num_classes", "scale", "margin", "feature_norm", "weight_norm", "angle"):
        assert getattr(copy, name) == getattr(head, name) == config[name]
    assert type(copy.kernel_initializer) is type(head.kernel_initializer)
    serialized = keras.saving.serialize_keras_object(head)
    assert serialized["registered_name"] == "he_keras>CosineHead"
    assert keras.saving.deserialize_keras_object(serialized).get_config() == config


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("options", HEADS)
def test_keras_file_round_trip(tmp_path, policy, options):
    inputs = keras.Input((4,))
    hidden = FeatureNorm(dtype=policy, name="unit")(keras.layers.Dense(6, dtype=policy)(inputs))
    model = keras.Model(inputs, CosineHead(3, scale=9.0, dtype=policy, **options)(hidden))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    data = np.random.default_rng(12).normal(size=(5, 4)).astype("float32")
    assert np.array_equal(loaded(data), model(data))
    assert type(loaded.get_layer("unit")) is FeatureNorm
    assert loaded.layers[-1].get_config() == model.layers[-1].get_config()
    assert loaded.layers[-1].kernel.dtype == "float32"


NOT_A_NUMBER = float("nan")
BAD_ARGUMENTS = [
    *[(dict(num_classes=n), "num_classes") for n in (1, 0, -3, 2.5, None, "10", NOT_A_NUMBER)],
    *[(dict(scale=s), "scale") for s in (0, -1.0, NOT_A_NUMBER, float("inf"), None, "15")],
    *[(dict(margin=m), "margin") for m in (-0.1, NOT_A_NUMBER, float("inf"), None, "0.2")],
    *[(dict(angle=a), "angle") for a in ("sine", None, "", 1)],
    (dict(angle="arc", feature_norm=False), "feature_norm=False, weight_norm=True"),
    (dict(angle="arc", weight_norm=False), "feature_norm=True, weight_norm=False"),
]


@pytest.mark.parametrize("arguments, named", BAD_ARGUMENTS)
def test_constructor_says_what_is_wrong(arguments, named):
    with pytest.raises(ValueError, match=f"received {named}") as caught:
        CosineHead(**{"num_classes": 10, **arguments})
    assert re.fullmatch(WHAT_EXPECTED_RECEIVED, str(caught.value))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (2, 3, 3, 4)])
def test_head_refuses_anything_but_feature_vectors(shape):
    with pytest.raises(ValueError, match=r"received input_shape=\(") as caught:
        CosineHead(3)(tf.zeros(shape))
    assert "; expected shape (batch, features); received input_shape=" in str(caught.value)
    with pytest.raises(ValueError, match="of known length"):
        CosineHead(3).build((None, None))


def test_numpy_numbers_are_numbers():
    head = CosineHead(np.int64(3), scale=np.float32(15), margin=np.float64(0.2))
    assert head.get_config()["num_classes"] == 3 and type(head.scale) is float
