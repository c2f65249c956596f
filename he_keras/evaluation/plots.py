"""Pictures of robustness results. Matplotlib is imported where it is used."""

import pathlib

from he_keras.atomic_files import replacing

# Told apart by readers with any colour vision, and in print.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = pathlib.Path(path)
    names = list(next(iter(results.values())))
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.3 * len(names), 3.4), layout="constrained")
    width = 0.8 / len(results)
    for number, (model, accuracies) in enumerate(results.items()):
        places = [group + (number - (len(results) - 1) / 2) * width for group in range(len(names))]
        heights = [100.0 * accuracies[name] for name in names]
        colour = _COLOURS[number % len(_COLOURS)]
        bars = axes.bar(places, heights, 0.95 * width, color=colour, label=model)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("accuracy in %")
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=len(results))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    pyplot.close(figure)
    return path
