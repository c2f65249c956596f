"""A model of half-precision layers once more in float32, for formats that know nothing else."""

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
    # What holds other layers computes nothing itself.
    layers = model._flatten_layers(include_self=False)
    computing = [layer for layer in layers if not list(layer._flatten_layers(include_self=False))]
    weighted = [layer for layer in computing if layer.weights]
    return tuple(sorted({layer.compute_dtype for layer in weighted or computing}))


def in_float32(model):
    """Returns the model itself if its layers compute in float32, else such a copy of it.

    Weights are float32 under mixed precision, so that the copy has the same.
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
    """The configuration with every half-precision policy replaced, wherever it stands."""
    if isinstance(config, dict):
        return {key: _replaced(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_replaced(value) for value in config)
    return "float32" if isinstance(config, str) and config in _HALF_PRECISION else config
