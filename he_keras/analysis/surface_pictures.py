"""Pictures of a function of two variables: as a relief and as a map with contour lines."""

from collections.abc import Sequence

import numpy as np

# Grows evenly in lightness, so that it reads in grey and with any colour vision.
_COLOURS = "cividis"
_NUM_LEVELS = 13
_LABEL_SIZE = 8


def common_range(values: Sequence) -> tuple[float, float]:
    """Returns the smallest and largest finite value, for pictures that share a scale."""
    numbers = np.concatenate([as_array(each).reshape(-1) for each in values])
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return 0.0, 1.0
    low, high = float(numbers.min()), float(numbers.max())
    return (low, high) if high > low else (low, low + 1.0)


def as_array(values) -> np.ndarray:
    """Returns an array of what comes back from a .json file, where None stands for not finite."""
    return np.array(values, dtype=np.float64)


def draw_relief(axes, offsets: Sequence[float], values, value_range: tuple[float, float]) -> None:
    """Draws `values[first, second]` as a relief on three-dimensional axes."""
    second, first = np.meshgrid(offsets, offsets)
    axes.plot_surface(
        first,
        second,
        as_array(values),
        cmap=_COLOURS,
        vmin=value_range[0],
        vmax=value_range[1],
        rstride=1,
        cstride=1,
        linewidth=0.2,
        edgecolor="#333333",
    )
    axes.set_zlim(*value_range)
    axes.view_init(elev=28, azim=-125)
    axes.tick_params(labelsize=_LABEL_SIZE - 1, pad=-2)
    few_ticks(axes, 2)
    axes.set_box_aspect((1, 1, 0.8), zoom=0.9)


def draw_map(axes, offsets: Sequence[float], values, value_range: tuple[float, float]) -> None:
    """Draws `values[first, second]` from above: lightness, and contour lines with their values."""
    from matplotlib.ticker import MaxNLocator

    levels = MaxNLocator(_NUM_LEVELS).tick_values(*value_range)
    # Lines and labels stand out against the dark low parts and against the light high ones.
    colours = ["white" if level < np.mean(value_range) else "black" for level in levels]
    # Contours take rows as the vertical axis; the first direction shall lie along the horizontal.
    heights = as_array(values).T
    axes.contourf(offsets, offsets, heights, levels=levels, cmap=_COLOURS, extend="both")
    lines = axes.contour(offsets, offsets, heights, levels=levels, colors=colours, linewidths=0.6)
    axes.clabel(lines, fontsize=_LABEL_SIZE - 1, fmt="%g")
    few_ticks(axes, 4)
    axes.set_aspect("equal")
    axes.tick_params(labelsize=_LABEL_SIZE)


def few_ticks(axes, count: int) -> None:
    """Puts round numbers, in so many intervals, on both directions."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10]))


def label_directions(axes, first: str, second: str) -> None:
    """Names the two directions."""
    distance = {"labelpad": -4} if hasattr(axes, "zaxis") else {}
    axes.set_xlabel(first, fontsize=_LABEL_SIZE, **distance)
    axes.set_ylabel(second, fontsize=_LABEL_SIZE, **distance)
