"""Models and subjects whose analyses have closed forms."""

import keras
import numpy as np

import he_keras as he
from he_keras.analysis import Subject


def linear_model(kernel, bias=None, name="head"):
    """A `keras.Model` with logits `images @ kernel + bias`."""
    kernel = np.asarray(kernel, np.float32)
    bias = np.zeros(kernel.shape[1]) if bias is None else np.asarray(bias)
    inputs = keras.Input((kernel.shape[0],))
    model = keras.Model(inputs, keras.layers.Dense(kernel.shape[1], name=name)(inputs))
    model.set_weights([kernel, bias])
    return model


def he_model(kernel, **options):
    """An HE head on the images themselves as features."""
    kernel = np.asarray(kernel, np.float32)
    network = keras.Sequential([keras.Input((kernel.shape[0],)), keras.layers.Identity()])
    model = he.HEAdversarialModel(network, he.CosineHead(kernel.shape[1], **options))
    model.head.set_weights([kernel])
    return model


def subject(model, images, labels, epsilon=0.1, name="mine", settings=None, norm="linf"):
    images = np.asarray(images, np.float32)
    threat = he.ThreatModel(norm, epsilon)
    return Subject(name, model, images, np.asarray(labels), threat, settings or {})


def run_settings(
    num_steps=10, kind="he", scale=15.0, margin=0.2, feature_norm=True, weight_norm=True
):
    """The part of a run's configuration that the comparisons read."""
    return {
        "objective": {"name": "pgd_at", "num_steps": num_steps},
        "head": {
            "kind": kind,
            "scale": scale,
            "margin": margin,
            "feature_norm": feature_norm,
            "weight_norm": weight_norm,
        },
    }


def drawn(analysis, numbers):
    """The figure of an analysis, laid out as it would be saved."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    analysis.draw(numbers, figure)
    figure.canvas.draw()
    return figure


def texts(figure):
    """Every text of a figure that is not empty."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]
