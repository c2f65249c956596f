"""Pictures of robustness results."""

import pathlib

from he_keras.drawing import draw_bars, new_figure, save_figure


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
