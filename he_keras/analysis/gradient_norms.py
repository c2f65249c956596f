"""Which examples move the weights: gradient norms on adversarial over clean examples, by layer.

Paper: "Boosting Adversarial Training with Hypersphere Embedding", Fig. 3. It shows the ratio
`E(|grad_w L(x*)| / |grad_w L(x)|)` for each parameter w. A high ratio means that training attends
to the adversarial examples.

Deviations: the released script prints the ratio for its ImageNet model. Its clean branch runs in
training mode on images that are not standardised. Here both branches see the same model in
inference mode.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from he_keras import losses
from he_keras.analysis.analysis import Analysis, Subject, batches
from he_keras.analysis.registry import register
from he_keras.arguments import check_positive_integer, check_seed
from he_keras.drawing import legend_below, plain_axes, style
from he_keras.objectives.objective import margin_cross_entropy

_MOST_TICKS = 40
_LINEAR_UP_TO = 20.0
_PANELS = {"mean_ratio": "mean of ratios (the paper's)", "median_ratio": "median of ratios"}


def weight_gradient_norms(model, images, labels, batch_size: int = 1) -> dict[str, np.ndarray]:
    """Returns for each layer the norms of the gradient of the training loss in its kernel.

    The loss is the cross-entropy with the head's margin, the mean over each batch; the model runs
    in inference mode. Cost: a forward and a full backward pass for each example.

    Args:
        model: a `keras.Model` with trainable kernels.
        images: images, `(n, ...)`.
        labels: integer labels.
        batch_size: examples that a gradient is the mean of; 1 for the gradient of each example.

    Returns:
        For each layer, in the model's order, an array of one norm for each batch.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.analysis import weight_gradient_norms
        >>> dense = keras.layers.Dense(2, kernel_initializer="zeros", name="head")
        >>> model = keras.Sequential([keras.Input((2,)), dense])
        >>> norms = weight_gradient_norms(model, np.array([[3.0, 4.0]], "float32"), np.array([0]))
        >>> {layer: round(float(each[0]), 4) for layer, each in norms.items()}
        {'head': 3.5355}
    """
    kernels = _kernels(model)

    @tf.function(input_signature=_signature(images))
    def norms(batch, batch_labels):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for kernel in kernels.values():
                tape.watch(kernel.value)
            logits = model(batch, training=False)
            loss = tf.reduce_mean(_training_loss(model, logits, batch_labels))
        values = [kernel.value for kernel in kernels.values()]
        gradients = tape.gradient(loss, values, unconnected_gradients="zero")
        flat = [tf.reshape(tf.cast(each, tf.float32), [-1]) for each in gradients]
        return tf.stack([tf.norm(each) for each in flat])

    rows = [norms(x, y).numpy() for x, y, _ in batches(images, labels, batch_size)]
    return dict(zip(kernels, np.array(rows).T, strict=True))


@register("gradient-norms")
@dataclasses.dataclass(eq=False)
class GradientNorms(Analysis):
    """Weight-gradient norms on adversarial over clean examples, layer by layer (HE paper, Fig. 3).

    Adversarial examples are the last iterates of PGD from a uniform start, also of images that the
    model misclassifies without any attack. The median of the ratios and the ratio of the means are
    given with the paper's mean of ratios. One clean example with nearly no gradient can make that
    mean arbitrarily large.
    Cost for each example: num_steps + 2 forward passes and as many backward passes.

    Args:
        num_steps: steps of PGD, each of 2.5 * epsilon / num_steps.
        batch_size: examples that a gradient is the mean of: 1 as in the paper's formula.
        seed: seed of the random start.
    """

    num_steps: int = 10
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_integer("num_steps", self.num_steps)
        check_positive_integer("batch_size", self.batch_size)
        check_seed(self.seed)

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns for each subject its layers, and three ratios for each of them."""
        # A model without kernels is refused before any work.
        for subject in subjects:
            _kernels(subject.model)
        return super().measure(subjects)

    def measure_one(self, subject: Subject) -> dict:
        """Returns the layers, and three ratios for each of them."""
        x_adv = subject.last_iterates(self.num_steps, self.seed)
        both = [
            weight_gradient_norms(subject.model, images, subject.labels, self.batch_size)
            for images in (subject.images, x_adv)
        ]
        layers = list(both[0])
        columns = [_ratios(both[0][layer], both[1][layer]) for layer in layers]
        return {"layers": layers, **{key: [each[key] for each in columns] for key in columns[0]}}

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws the ratios of every layer, mean and median, one curve for each model."""
        panels = figure.subplots(1, len(_PANELS), sharey=True)
        ticks = _shared_layer_names([entry["layers"] for entry in numbers.values()])
        width = 1.8 + 0.24 * min(len(ticks), _MOST_TICKS)
        figure.set_size_inches(max(7.0, 2.0 * width), 5.0)
        for axes, (key, title) in zip(panels, _PANELS.items(), strict=True):
            for number, (name, entry) in enumerate(numbers.items()):
                ratios = np.array(entry[key], float)
                axes.plot(range(len(ratios)), ratios, markersize=4, label=name, **style(number))
            axes.axhline(1.0, color="#888888", linewidth=0.8)
            places = range(0, len(ticks), -(-len(ticks) // _MOST_TICKS))
            axes.set_xticks(places, [ticks[place] for place in places], rotation=90, fontsize=7)
            axes.set_xlabel("layer, from input to head")
            axes.set_title(title, fontsize=9)
            plain_axes(axes)
        _set_height(panels[0], numbers)
        panels[0].set_ylabel("adversarial / clean gradient norm")
        figure.suptitle("Weight gradients on adversarial and clean examples", fontsize=10)
        legend_below(figure, panels[0], 3)

    def table(self, numbers: Mapping) -> str:
        """Returns for each model the ranges of its three ratios over the layers."""
        lines = []
        for name, entry in numbers.items():
            ranges = []
            for key in ("mean_ratio", "median_ratio", "ratio_of_means"):
                ratios = np.array(entry[key], float)
                ranges.append(f"{key} {np.nanmin(ratios):.2f} to {np.nanmax(ratios):.2f}")
            lines.append(f"{name}: {', '.join(ranges)} over {len(entry['layers'])} layers")
        return "\n".join(lines)


def _set_height(axes, numbers: Mapping) -> None:
    """Makes the axis logarithmic if the ratios are far apart."""
    ratios = [
        ratio for entry in numbers.values() for key in _PANELS for ratio in entry[key] if ratio
    ]
    largest = max(ratios, default=1.0)
    axes.set_ylim(bottom=0.0)
    if largest > _LINEAR_UP_TO:
        axes.set_yscale("log")
        axes.set_ylim(0.5 * min(1.0, *ratios), 2.0 * largest)


def _shared_layer_names(layers: Sequence[Sequence[str]]) -> list[str]:
    """Names for the axis: a layer's own if all models share it, else its number; "head" last."""
    longest = max(layers, key=len)
    names = []
    for place, name in enumerate(longest):
        called = {each[place] for each in layers if place < len(each)}
        names.append(name if len(called) == 1 else f"layer {place + 1}")
    if len({len(each) for each in layers}) == 1 and len({each[-1] for each in layers}) > 1:
        names[-1] = "head"
    return names


def _kernels(model) -> dict:
    """The trainable kernels of a model by the name of their layer."""
    variables = model.trainable_variables if isinstance(model, keras.layers.Layer) else []
    layers: dict[str, list] = {}
    for variable in variables:
        if len(variable.shape) > 1:
            layers.setdefault(variable.path.rpartition("/")[0], []).append(variable)
    kernels = {}
    shared = _shared_parts(list(layers))
    for layer, own in layers.items():
        name = "/".join(layer.split("/")[shared:])
        for variable in own:
            # Some layers have two, such as a separable convolution.
            kernels[name if len(own) == 1 else f"{name}/{variable.name}"] = variable
    if not kernels:
        raise ValueError(
            "No weights to take gradients in; expected a built keras.Model with trainable kernels; "
            f"received {type(model).__name__}"
        )
    return kernels


def _shared_parts(paths: Sequence[str]) -> int:
    """How many leading parts all paths share, such as the model's name; the last never counts."""
    parts = [path.split("/") for path in paths]
    shared = 0
    while all(len(each) > shared + 1 for each in parts) and (
        len({each[shared] for each in parts}) == 1
    ):
        shared += 1
    return shared


def _signature(images: np.ndarray) -> tuple:
    """One trace for every batch size."""
    return (
        tf.TensorSpec([None, *images.shape[1:]], images.dtype),
        tf.TensorSpec([None], tf.int32),
    )


def _training_loss(model, logits, labels):
    if hasattr(model, "head"):
        return margin_cross_entropy(model, logits, labels)
    return losses.cross_entropy(logits, labels)


def _ratios(clean: np.ndarray, adversarial: np.ndarray) -> dict:
    """Three ways to put a layer's norms into one ratio, without batches of no clean gradient."""
    clean, adversarial = clean.astype(np.float64), adversarial.astype(np.float64)
    counted = clean > 0
    skipped = int((~counted).sum())
    ratios = adversarial[counted] / clean[counted]
    if not len(ratios):
        return {
            "mean_ratio": None,
            "median_ratio": None,
            "ratio_of_means": None,
            "skipped": skipped,
        }
    return {
        "mean_ratio": float(ratios.mean()),
        "median_ratio": float(np.median(ratios)),
        "ratio_of_means": float(adversarial.mean() / clean.mean()),
        "skipped": skipped,
    }
