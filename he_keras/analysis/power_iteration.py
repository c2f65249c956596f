"""The eigenvalues of largest size of a symmetric matrix that is known by its products only."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_FLOOR = 1e-30


class Eigenpair(NamedTuple):
    """An eigenvalue, its unit eigenvector, and how far to believe them.

    Attributes:
        value: the Rayleigh quotient `v' H v`.
        vector: v, of length 1.
        residual: the length of `H v - value * v`: an exact eigenvalue lies no farther from `value`.
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
    orthogonal to the earlier ones (deflation); for exact earlier pairs that is the same as taking
    `value * v v'` off the matrix, and for inexact ones it cannot find them again.

    Two eigenvalues of nearly the same size are slow to come apart, and of opposite signs they stop
    the quotient at a mixture of both: then `residual` is large. Looked at that way only the
    residual, not `converged`, vouches for a value.

    Args:
        product: function from v to H v, both of shape `(dimension,)` and float64.
        dimension: order of the matrix.
        num_pairs: how many pairs.
        max_iterations: most products for one pair.
        tolerance: relative change of the quotient that ends the iteration.
        seed: seed of the starts.

    Example:
        >>> import numpy as np
        >>> from he_keras.analysis.power_iteration import top_eigenpairs
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
