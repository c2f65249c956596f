"""A float32 copy of a model with half-precision layers, for formats that have only float32."""

import keras

_HALF_PRECISION = ("mixed_bfloat16", "mixed_float16")


def compute_dtypes(model) -> tuple[str, ...]:
    """Returns the dtypes in which the layers of a model compute.

    Example:
        >>> import keras
        >>> from he_keras.export.float32_copy import compute_dtypes
        >>> layers = [keras.Input((2,)), keras.layers.Dense(2, dtype="mixed_bfloat16")]
        >>> compute_dtypes(keras.Sequential(layers))
        ('bfloat16',)
    """
    # A layer that contains others computes nothing itself.
    layers = model._flatten_layers(include_self=False)
    computing = [layer for layer in layers if not list(layer._flatten_layers(include_self=False))]
    weighted = [layer for layer in computing if layer.weights]
    return tuple(sorted({layer.compute_dtype for layer in weighted or computing}))


def in_float32(model):
    """Returns the model itself if its layers compute in float32, otherwise a copy that does.

    Under mixed precision the weights are float32, so the copy has the same weights.
    """
    if compute_dtypes(model) == ("float32",):
        return model
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    copy = keras.saving.deserialize_keras_object(_replaced(config))
    if not copy.built:
        copy.build(config["build_config"]["input_shape"])
    copy.set_weights(model.get_weights())
    return copy


def _replaced(config):
    """The configuration with every half-precision policy replaced by float32."""
    if isinstance(config, dict):
        return {key: _replaced(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_replaced(value) for value in config)
    return "float32" if isinstance(config, str) and config in _HALF_PRECISION else config
