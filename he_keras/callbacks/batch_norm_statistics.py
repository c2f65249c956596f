"""Measures batch-norm statistics again, for weights that no training step has used."""

import keras
import numpy as np


def reestimate_batch_norm(model, batches, perturb=None) -> None:
    """Sets the moving statistics of batch norm to their mean over batches, whatever the momentum.

    Every batch passes through the model in training mode, with a momentum of 0, and counts by its
    number of images. Everything else that such a pass changes, such as the state of random layers,
    is put back.

    Args:
        model: any built `keras.Model`; layers that are not trainable keep their statistics.
        batches: images, or tuples that begin with images and labels.
        perturb: function (model, images, labels) -> images; it sees the statistics from before.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.callbacks import reestimate_batch_norm
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> reestimate_batch_norm(model, [np.array([[1.0], [3.0]]), np.array([[5.0], [9.0]])])
        >>> [round(float(each[0]), 3) for each in model.get_weights()[2:]]
        [4.5, 2.5]
    """
    layers = batch_norm_layers(model)
    statistics = moving_statistics(layers)
    everything = model.non_trainable_variables
    before, everything_before = values_of(statistics), values_of(everything)
    totals, num_images = [np.zeros(each.shape) for each in before], 0
    try:
        for images, labels in map(_images_and_labels, batches):
            if perturb is not None:
                images = perturb(model, images, labels)
            _pass_without_momentum(model, layers, images)
            for total, of_batch in zip(totals, values_of(statistics), strict=True):
                total += len(images) * of_batch.astype(np.float64)
            num_images += len(images)
            assign_all(statistics, before)
    finally:
        assign_all(everything, everything_before)
    if not num_images:
        raise ValueError("No images for the batch-norm statistics; expected batches; received none")
    assign_all(statistics, [total / num_images for total in totals])


def batch_norm_layers(model) -> list:
    """Returns a model's batch-norm layers, at any depth."""
    layers = [
        each
        for each in model._flatten_layers()
        if isinstance(each, keras.layers.BatchNormalization)
    ]
    if any(getattr(each, "renorm", False) for each in layers):
        raise ValueError(
            "Batch renormalisation has more statistics than a mean and a variance; expected "
            "layers with renorm=False; received renorm=True"
        )
    return layers


def _pass_without_momentum(model, layers: list, images) -> None:
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0
        model(images, training=True)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def moving_statistics(layers: list) -> list:
    """Returns the variables that hold the moving averages of batch-norm layers."""
    return [each for layer in layers for each in (layer.moving_mean, layer.moving_variance)]


def _images_and_labels(batch) -> tuple:
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    images = keras.ops.convert_to_tensor(parts[0], dtype="float32")
    return images, parts[1] if len(parts) > 1 else None


def values_of(variables) -> list[np.ndarray]:
    """Returns copies of the values of variables."""
    return [copy_of(each) for each in variables]


def copy_of(variable) -> np.ndarray:
    """Returns a copy of the value of a variable."""
    # Without the copy the array may be a view of memory that the next assignment overwrites.
    return np.array(keras.ops.convert_to_numpy(variable.value), copy=True)


def assign_all(variables, values) -> None:
    """Assigns a value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
