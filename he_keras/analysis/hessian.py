"""The sharpest directions of the loss in the weights: top Hessian eigenvalues, and the loss there.

Paper: Liu et al. 2020, "On the loss landscape of adversarial training" (PAS). Its rebuttal points
to the loss along the top two Hessian eigenvectors to show how sharp a minimum is. This is what its
tool does, and what happens here:

* The adversarial examples are made once, at the given weights, and do not follow the weights.
* Power iteration starts from N(0, I). It differentiates twice, over all examples.
* It ends after 50 iterations, or as soon as the value changes by less than 1e-3 of itself.
* It finds the eigenvalue of largest size, of either sign; eigenvectors already found are removed.
* The last batch is left out if it is not full.

Deviation: eigenvectors already found are removed by projection, see `top_eigenpairs`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from he_keras import attacks, losses
from he_keras.analysis.analysis import Analysis, Subject
from he_keras.analysis.registry import register
from he_keras.analysis.weight_space import WeightSpace
from he_keras.arguments import check_number, check_positive_integer, check_seed, positive_number
from he_keras.drawing import (
    common_range,
    draw_bars,
    draw_contours,
    draw_relief,
    label_directions,
    legend_above,
)

_AXES = "1st eigenvector", "2nd eigenvector"
# Shorter vectors count as zero.
_FLOOR = 1e-30


class HessianSpectrum(NamedTuple):
    """The eigenvalues of largest size, the largest first.

    Attributes:
        eigenvalues: shape `(k,)`.
        eigenvectors: unit vectors over all trainable weights, `(k, weights)`.
        residuals: length of `H v - value * v`. An exact eigenvalue lies no farther away than that.
        num_products: Hessian-vector products that each one took.
        converged: whether each had settled within the iterations allowed.
        num_examples: how many examples entered: whole batches only.
        loss: the mean loss at the weights.
    """

    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    residuals: np.ndarray
    num_products: np.ndarray
    converged: np.ndarray
    num_examples: int
    loss: float


def top_hessian_eigenvalues(
    model,
    images,
    labels,
    num_eigenvalues: int = 1,
    attack: attacks.Attack | None = None,
    loss: Callable = losses.cross_entropy,
    batch_size: int = 64,
    max_iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> HessianSpectrum:
    """Returns the eigenvalues of largest size of the loss's Hessian in the trainable weights.

    The loss is the mean over the examples, in inference mode, without the margin of a cosine head.
    With `attack`, it is that of adversarial examples which are made once and do not follow the
    weights. Memory is that of one batch, whatever the number of examples.

    Cost: at most `num_eigenvalues * max_iterations` Hessian-vector products, each about as long as
    two forward and two full backward passes over the examples.

    Args:
        model: a `keras.Model` with trainable weights.
        images: images.
        labels: integer labels.
        num_eigenvalues: how many.
        attack: makes the examples; None for the clean ones.
        loss: function from logits and labels to per-example losses.
        batch_size: examples in a pass; what is left over after the last full batch is not used.
        max_iterations: most products for one eigenvalue.
        tolerance: relative change that ends the iteration.
        seed: seed of the starts.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.analysis import top_hessian_eigenvalues
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
        >>> model.set_weights([np.zeros((1, 2), "float32")])
        >>> images, labels = np.ones((4, 1), "float32"), np.zeros(4, int)
        >>> top_hessian_eigenvalues(model, images, labels, batch_size=2).eigenvalues.round(3)
        array([0.5])
    """
    check_positive_integer("num_eigenvalues", num_eigenvalues)
    space = _weight_space(model, images, labels, attack, batch_size, loss)
    return _spectrum(space, num_eigenvalues, max_iterations, tolerance, seed)


def _weight_space(model, images, labels, attack, batch_size: int, loss) -> WeightSpace:
    check_positive_integer("batch_size", batch_size)
    num_used = len(images) // batch_size * batch_size
    if attack is not None and num_used:
        # What is left out need not be attacked.
        images, labels = images[:num_used], labels[:num_used]
        images = attack(model, images, labels).x_adv
    return WeightSpace(model, images, labels, batch_size, loss)


def _spectrum(space, num_eigenvalues, max_iterations, tolerance, seed) -> HessianSpectrum:
    check_positive_integer("max_iterations", max_iterations)
    check_number("tolerance", tolerance, 0.0)
    check_seed(seed)
    pairs = top_eigenpairs(
        space.hessian_product, space.dimension, num_eigenvalues, max_iterations, tolerance, seed
    )
    pairs.sort(key=lambda pair: -abs(pair.value))
    values, vectors, residuals, num_products, converged = zip(*pairs, strict=True)
    return HessianSpectrum(
        np.array(values),
        np.array([_with_fixed_sign(vector) for vector in vectors]),
        np.array(residuals),
        np.array(num_products),
        np.array(converged),
        space.num_examples,
        space.value(),
    )


def _with_fixed_sign(vector: np.ndarray) -> np.ndarray:
    """Of a vector and its opposite, the one whose entry of largest size is positive."""
    return vector * np.sign(vector[np.abs(vector).argmax()])


@register("hessian")
@dataclasses.dataclass(eq=False)
class Hessian(Analysis):
    """Top Hessian eigenvalues of the loss in the weights, and the loss along them (PAS).

    Args:
        num_eigenvalues: how many; the surface needs two.
        attack: name of the attack that makes the examples at the given weights, once; "none" for
            the clean loss. A named attack runs to its end on every example.
        batch_size: examples in a pass; what is left over after the last full batch is not used.
        max_iterations: most Hessian-vector products for one eigenvalue.
        tolerance: relative change that ends the iteration.
        radius: how far the surface reaches along each eigenvector, as a distance between weights.
        num_points: points of the surface along each direction.
        seed: seed of the starts, and of the attack.
    """

    num_eigenvalues: int = 2
    attack: str = "pgd-10"
    batch_size: int = 64
    max_iterations: int = 50
    tolerance: float = 1e-3
    radius: float = 0.25
    num_points: int = 11
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("num_eigenvalues", self.num_eigenvalues, 2)
        check_number("num_points", self.num_points, 3)
        check_positive_integer("batch_size", self.batch_size)
        check_positive_integer("max_iterations", self.max_iterations)
        check_number("tolerance", self.tolerance, 0.0)
        check_seed(self.seed)
        self.radius = positive_number("radius", self.radius)

    def measure(self, subjects: Sequence[Subject]) -> dict:
        """Returns eigenvalues and surface for each subject."""
        made = [self._attack_on(subject) for subject in subjects]
        return {
            subject.name: self._measure_one(subject, attack)
            for subject, attack in zip(subjects, made, strict=True)
        }

    def _attack_on(self, subject: Subject) -> attacks.Attack | None:
        if self.attack == "none":
            return None
        options = {"stop_when_broken": False, "keep": "last", "seed": self.seed}
        return attacks.get(self.attack, subject.threat, **options)

    def _measure_one(self, subject: Subject, attack) -> dict:
        space = _weight_space(
            *(subject.model, subject.images, subject.labels, attack, self.batch_size),
            losses.cross_entropy,
        )
        spectrum = _spectrum(
            space, self.num_eigenvalues, self.max_iterations, self.tolerance, self.seed
        )
        first, second = spectrum.eigenvectors[:2]
        offsets = np.linspace(-self.radius, self.radius, self.num_points)
        return {
            "eigenvalues": spectrum.eigenvalues,
            "residuals": spectrum.residuals,
            "num_products": spectrum.num_products,
            "converged": spectrum.converged,
            "num_examples": spectrum.num_examples,
            "num_weights": space.dimension,
            "weight_norm": float(np.linalg.norm(space.origin)),
            "loss": spectrum.loss,
            "offsets": offsets,
            "surface": space.surface(first, second, offsets),
        }

    def table(self, numbers: Mapping) -> str:
        """Returns the eigenvalues with their residuals."""
        lines = []
        for name, entry in numbers.items():
            pairs = zip(entry["eigenvalues"], entry["residuals"], strict=True)
            values = ", ".join(f"{value:.2f} +- {residual:.2f}" for value, residual in pairs)
            unsettled = "" if all(entry["converged"]) else " (not converged)"
            lines.append(f"{name}: loss {entry['loss']:.3f}, eigenvalues {values}{unsettled}")
        return "\n".join(lines)

    def draw(self, numbers: Mapping, figure) -> None:
        """Draws the eigenvalues as bars, and for each model the loss as relief and as map."""
        figure.set_size_inches(3.0 + 2.7 * len(numbers), 5.6)
        examples = "clean examples" if self.attack == "none" else f"fixed {self.attack} examples"
        figure.suptitle(
            f"Sharpest directions of the loss in the weights, on {examples}", fontsize=10
        )
        grid = figure.add_gridspec(2, len(numbers) + 1)
        axes = figure.add_subplot(grid[:, 0])
        names = [f"{number + 1}" for number in range(self.num_eigenvalues)]
        draw_bars(axes, names, {name: entry["eigenvalues"] for name, entry in numbers.items()})
        axes.set_xlabel("rank by size")
        axes.set_ylabel("Hessian eigenvalue")
        axes.axhline(0.0, color="black", linewidth=0.8)
        legend_above(axes, 1)
        heights = common_range([entry["surface"] for entry in numbers.values()])
        for column, (name, entry) in enumerate(numbers.items(), 1):
            relief = figure.add_subplot(grid[0, column], projection="3d")
            draw_relief(relief, entry["offsets"], entry["surface"], heights)
            relief.set_title(f"{name}\nmean cross-entropy", fontsize=9)
            flat = figure.add_subplot(grid[1, column])
            draw_contours(flat, entry["offsets"], entry["surface"], heights)
            for each in (relief, flat):
                label_directions(each, *_AXES)


class Eigenpair(NamedTuple):
    """An eigenvalue, its unit eigenvector, and how far both can be trusted.

    Attributes:
        value: the Rayleigh quotient `v' H v`.
        vector: v, of length 1.
        residual: length of `H v - value * v`. An exact eigenvalue lies no farther from `value`.
        num_products: how many products `H v` it took.
        converged: the quotient had settled when the iteration ended.
    """

    value: float
    vector: np.ndarray
    residual: float
    num_products: int
    converged: bool


def top_eigenpairs(
    product: Callable[[np.ndarray], np.ndarray],
    dimension: int,
    num_pairs: int = 1,
    max_iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> list[Eigenpair]:
    """Finds the eigenvalues of largest size, of either sign, one after the other.

    Power iteration from a standard normal vector. It ends when the Rayleigh quotient changes by
    less than `tolerance` of itself. Each later pair is looked for among the vectors that are
    orthogonal to the earlier ones (deflation). If the earlier pairs are exact, that is the same as
    taking `value * v v'` off the matrix. If they are inexact, it still cannot find them again.

    Two eigenvalues of nearly the same size separate slowly. If their signs differ, the quotient
    settles at a mixture of both, and `residual` is large. So only a small residual shows that a
    value is right. `converged` does not.

    Args:
        product: function from v to H v, both of shape `(dimension,)` and float64.
        dimension: order of the matrix.
        num_pairs: how many pairs.
        max_iterations: most products for one pair.
        tolerance: relative change of the quotient that ends the iteration.
        seed: seed of the starts.

    Example:
        >>> import numpy as np
        >>> from he_keras.analysis.hessian import top_eigenpairs
        >>> sizes = np.array([1.0, -4.0, 2.0])
        >>> [round(pair.value, 2) for pair in top_eigenpairs(lambda v: sizes * v, 3, 2)]
        [-4.0, 2.0]
    """
    pairs: list[Eigenpair] = []
    for number in range(min(num_pairs, dimension)):
        start = np.random.default_rng((seed, number)).standard_normal(dimension)
        earlier = [pair.vector for pair in pairs]
        pairs.append(_one_pair(product, start, earlier, max_iterations, tolerance))
    return pairs


def _one_pair(product, start, earlier, max_iterations: int, tolerance: float) -> Eigenpair:
    vector = _unit(_orthogonal(start, earlier))
    value, converged, num_products = np.inf, False, 0
    for num_products in range(1, max_iterations + 1):
        image = product(vector)
        before, value = value, float(vector @ image)
        residual = float(np.linalg.norm(image - value * vector))
        converged = abs(value - before) <= tolerance * abs(value)
        following = _orthogonal(image, earlier)
        if converged or np.linalg.norm(following) <= _FLOOR:
            break
        if num_products < max_iterations:
            vector = _unit(following)
    return Eigenpair(value, vector, residual, num_products, bool(converged))


def _orthogonal(vector: np.ndarray, earlier: list[np.ndarray]) -> np.ndarray:
    # Twice, because the first pass leaves rounding errors of the size of what it took away.
    for _ in range(2):
        for other in earlier:
            vector = vector - (vector @ other) * other
    return vector


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), _FLOOR)
