"""What all charts and pictures share: colours, bars, curves, heat maps, surfaces, and their files.

Matplotlib and Pillow are imported where they are used. Everything can be read in grey and with any
colour vision.
"""

import base64
import io
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from he_keras.files import replacing

#: Told apart by readers with any colour vision; their lightness differs too.
COLOURS = ("#332288", "#cc6677", "#117733", "#ddaa33", "#88ccee", "#882255", "#44aa99", "#999933")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
# Grows evenly in lightness.
_COLOUR_MAP = "cividis"
_NUM_LEVELS = 13
_LABEL_SIZE = 8


def new_figure(width: float, height: float):
    """Returns an empty figure of a size in inches.

    It does not come from pyplot, which keeps figures alive and may ask for a screen.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path, dots_per_inch: int = 150) -> pathlib.Path:
    """Writes a figure into a picture file, complete or not at all; returns its path."""
    path = pathlib.Path(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dots_per_inch)
    return path


def style(number: int) -> dict:
    """Colour, marker and line of the number-th curve."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _LINES[number % len(_LINES)],
    }


def plain_axes(axes) -> None:
    """Takes away the frame's upper and right side, and adds a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_bars(
    axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], errors=None
) -> None:
    """Draws grouped bars with their values: one group for each name, one bar for each series.

    Args:
        axes: where to draw.
        groups: names of the groups.
        series: for each series one value in percent for each group.
        errors: for each series lengths of the error bars below and above, `(2, groups)`.
    """
    width = 0.82 / len(series)
    for number, (label, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        bars = axes.bar(
            [place + offset for place in range(len(groups))],
            values,
            0.94 * width,
            color=COLOURS[number % len(COLOURS)],
            hatch=_HATCHES[number % len(_HATCHES)],
            edgecolor="white",
            label=label,
            yerr=None if errors is None else errors[label],
            error_kw={"linewidth": 0.8, "ecolor": "#444444"},
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    plain_axes(axes)


def draw_curve(axes, places: Sequence, shares: Sequence[float], errors, number: int, label) -> None:
    """Draws the number-th curve of accuracies in percent, with an error bar at each point."""
    axes.errorbar(
        places,
        [100.0 * share for share in shares],
        yerr=errors,
        capsize=2,
        elinewidth=0.7,
        label=label,
        **style(number),
    )


def draw_cells(
    axes,
    values: np.ndarray,
    limits: tuple[float, float],
    text: str,
    fontsize: int = _LABEL_SIZE,
    top: float = 0,
):
    """Draws a heat map with a number in each cell; returns the image, for a colour bar.

    Args:
        axes: where to draw.
        values: the numbers, `(rows, columns)`; a cell of NaN stays empty.
        limits: the values that are darkest and lightest.
        text: how to write a number, such as "{:.1f}"; "" for no numbers.
        fontsize: of the numbers.
        top: vertical place of the first row.
    """
    num_rows, num_columns = values.shape
    extent = (-0.5, num_columns - 0.5, top + num_rows - 0.5, top - 0.5)
    image = axes.imshow(values, _COLOUR_MAP, vmin=limits[0], vmax=limits[1], extent=extent)
    for (row, column), value in np.ndenumerate(values):
        if text and np.isfinite(value):
            colour = "white" if value < sum(limits) / 2 else "black"
            look = {"ha": "center", "va": "center", "color": colour}
            axes.text(column, top + row, text.format(value), fontsize=fontsize, **look)
    return image


def legend_above(axes, num_columns: int) -> None:
    """Puts the legend between title and curves, where nothing is drawn."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=num_columns,
        fontsize=_LABEL_SIZE,
        frameon=False,
        borderaxespad=0.3,
    )


def legend_below(figure, axes, num_columns: int) -> None:
    """Puts the legend of one of several panels below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=num_columns, fontsize=_LABEL_SIZE
    )


def common_range(values: Sequence) -> tuple[float, float]:
    """Returns the smallest and largest finite value, for surfaces that share a scale."""
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
        cmap=_COLOUR_MAP,
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
    _few_ticks(axes, 2)
    axes.set_box_aspect((1, 1, 0.8), zoom=0.9)


def draw_contours(axes, offsets: Sequence[float], values, value_range: tuple[float, float]) -> None:
    """Draws `values[first, second]` from above: lightness, and contour lines with their values."""
    from matplotlib.ticker import MaxNLocator

    levels = MaxNLocator(_NUM_LEVELS).tick_values(*value_range)
    # Lines and labels stand out against the dark low parts and against the light high ones.
    colours = ["white" if level < np.mean(value_range) else "black" for level in levels]
    # Contours take rows as the vertical axis; the first direction shall lie along the horizontal.
    heights = as_array(values).T
    axes.contourf(offsets, offsets, heights, levels=levels, cmap=_COLOUR_MAP, extend="both")
    lines = axes.contour(offsets, offsets, heights, levels=levels, colors=colours, linewidths=0.6)
    axes.clabel(lines, fontsize=_LABEL_SIZE - 1, fmt="%g")
    _few_ticks(axes, 4)
    axes.set_aspect("equal")
    axes.tick_params(labelsize=_LABEL_SIZE)


def _few_ticks(axes, count: int) -> None:
    """Puts round numbers, in so many intervals, on both directions."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10]))


def label_directions(axes, first: str, second: str) -> None:
    """Names the two directions of a surface."""
    distance = {"labelpad": -4} if hasattr(axes, "zaxis") else {}
    axes.set_xlabel(first, fontsize=_LABEL_SIZE, **distance)
    axes.set_ylabel(second, fontsize=_LABEL_SIZE, **distance)


def png(shares: np.ndarray, longest_side: int | None = None, keep_pixels: bool = False) -> str:
    """Returns a picture as PNG in base64.

    Args:
        shares: values in [0, 1], `(height, width, 1 or 3)`; NaN counts as 0.
        longest_side: larger pictures are shrunk to it; None shrinks none.
        keep_pixels: shrink by leaving out pixels: mixing them would hide noise.
    """
    from PIL import Image

    shares = np.nan_to_num(np.asarray(shares, np.float64))
    pixels = np.rint(255.0 * np.clip(shares, 0.0, 1.0)).astype(np.uint8)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    longest = max(picture.size)
    if longest_side is not None and longest > longest_side:
        width, height = (max(1, round(each * longest_side / longest)) for each in picture.size)
        method = Image.Resampling.NEAREST if keep_pixels else Image.Resampling.LANCZOS
        picture = picture.resize((width, height), method)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def plot_accuracies(results: dict[str, dict[str, float]], path, title: str = "") -> pathlib.Path:
    """Draws grouped bars: one group for each kind of accuracy, one bar for each model.

    Args:
        results: for each model, accuracies (0..1) by name; all models have the same names.
        path: picture to write (.png).
        title: heading.

    Example:
        >>> from he_keras.evaluation import plot_accuracies
        >>> # plot_accuracies({"PGD-AT": {"clean": 0.99, "PGD-20": 0.8}}, "result.png")
    """
    names = list(next(iter(results.values())))
    figure = new_figure(1.6 + 1.3 * len(names), 3.4)
    axes = figure.subplots()
    series = {
        model: [100.0 * accuracies[name] for name in names] for model, accuracies in results.items()
    }
    draw_bars(axes, names, series)
    axes.set_ylabel("accuracy in %")
    # Room for the legend above bars of 100 %.
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=len(results))
    return save_figure(figure, path)
