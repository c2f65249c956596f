"""Colours, markers and bars that the analyses' pictures share; readable in grey."""

from collections.abc import Mapping, Sequence

#: Told apart by readers with any colour vision; their lightness differs too.
COLOURS = ("#332288", "#cc6677", "#117733", "#ddaa33", "#88ccee", "#882255", "#44aa99", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")


def style(number: int) -> dict:
    """Colour, marker and line of the number-th curve."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
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
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            label=label,
            yerr=None if errors is None else errors[label],
            error_kw={"linewidth": 0.8, "ecolor": "#444444"},
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    plain_axes(axes)


def legend_above(axes, num_columns: int) -> None:
    """Puts the legend between title and curves, where nothing is drawn."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=num_columns,
        fontsize=8,
        frameon=False,
        borderaxespad=0.3,
    )
