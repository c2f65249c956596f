"""Batch statistics of one pass, for other passes to normalise by.

Keras normalises a training-mode pass by the statistics of its own batch, and any other pass by the
moving averages. LLR compares the loss at two batches, which must be one function of the images: the
statistics of the clean batch serve for both, as tensors that the gradient flows through.

Nothing here depends on the layer's code: `ShownValues` shows a layer other values of its
moving averages, and collects what it would assign to them.
"""

import keras
import tensorflow as tf

from he_keras.objectives.shown_values import ShownValues


def training_pass(model, images, update: bool):
    """Runs the model in training mode; returns its logits and the statistics of the batch.

    The statistics are pairs of a layer's variable and the batch's value of it, as
    `ShownValues` takes them: within such a scope a pass in inference mode normalises by
    them. Layers that ignore the batch (frozen ones, for example) are not among them.

    Only layers of the kind `keras.layers.BatchNormalization` are covered, each called once. Losses
    that layers add while they run (activity regularisation) are not kept.

    Args:
        model: a built Keras model.
        images: the batch.
        update: whether the pass leaves behind what a training pass does: moving averages, states
            of random layers. If not, no variable changes.
    """
    layers = _normalizations(model)
    zeros = [
        (variable, tf.zeros(variable.shape, variable.dtype))
        for layer in layers
        for variable in _moving_averages(layer)
    ]
    scope = ShownValues(zeros)
    untouched = {id(variable): scope.get_current_value(variable) for variable, _ in zeros}
    with scope:
        logits = model(images, training=True)
    statistics = []
    for layer in layers:
        for variable in _moving_averages(layer):
            # From zero, the moving average has moved to this share of the batch's value.
            moved = scope.get_current_value(variable)
            if moved is untouched[id(variable)]:
                continue
            statistics.append((variable, moved / (1.0 - layer.momentum)))
            if update:
                variable.assign(variable * layer.momentum + tf.stop_gradient(moved))
    if update:
        _keep_other_updates(model, scope, untouched)
    return logits, statistics


def _keep_other_updates(model, scope: ShownValues, averages: dict) -> None:
    for variable in model.non_trainable_variables:
        value = scope.get_current_value(variable)
        if value is not None and id(variable) not in averages:
            variable.assign(value)


def _normalizations(model) -> list:
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        if layer.trainable and not layer.renorm and layer.momentum < 1.0
    ]


def _moving_averages(layer) -> tuple:
    return layer.moving_mean, layer.moving_variance
