"""`make quickstart`: PGD-AT with a linear and with a hypersphere head on scikit-learn's digits.

Trains both, attacks both, prints a table, writes a report of each and a comparison, and exports the
better one. Needs no data set. What an earlier quickstart left in the folder is moved to
`earlier-1`, `earlier-2` and so on; nothing is deleted or overwritten.
"""

import contextlib
import itertools
import pathlib
import shutil
import sys
import time

from absl import flags

from he_keras.programs import cli

_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/quickstart", "Folder of the results.")
_HEADS = {"linear": "PGD-AT", "he": "PGD-AT + HE"}
# What it writes into its folder. The runs of both heads and the versions in `serving` stay.
_FILES = ("table.txt", "result.png", "report.html", "comparison.html", "comparison.json")
_ATTACKS = ("pgd-20", "adaptive-pgd-20", "cw-linf-20", "autoattack")


def main(_argv) -> None:
    """Trains, evaluates and exports."""
    began = time.monotonic()
    folder = pathlib.Path(_OUTPUT_DIR.value)
    _run(folder)
    print(f"Total: {time.monotonic() - began:.0f} s")


def _run(folder: pathlib.Path) -> None:
    from he_keras.experiment import run_folder

    with cli.one_line_errors(), run_folder.held(folder, "writes its quickstart"):
        _set_aside(folder)
        results = {head: _train_and_evaluate(head, folder) for head in _HEADS}
        _write(results, folder)


def _write(results: dict, folder: pathlib.Path) -> None:
    lines = _table(results)
    print("\n" + "\n".join(lines))
    best = max(results, key=lambda head: results[head]["report"].worst_case)
    _export(best, results[best], folder)
    (folder / "table.txt").write_text("\n".join(lines) + "\n")
    print(f"  Picture:     {_draw(results, folder)}")
    print(f"  Report:      {_reports(best, folder)}")
    print(f"  Comparison:  {folder / 'comparison.html'}")


def _train_and_evaluate(head: str, folder: pathlib.Path) -> dict:
    import he_keras as he

    config = _load_config()
    config.head.kind = head
    config.name = f"quickstart_{head}"
    run = folder / head
    print(f"Training {_HEADS[head]} on digits ...", flush=True)
    began = time.monotonic()
    training = he.experiment.prepare_training(config, run)
    model = training.run()
    seconds = time.monotonic() - began
    report = he.evaluate_robustness(
        model,
        training.datasets.test,
        he.experiment.build_threat(config),
        _ATTACKS,
        run / "evaluation",
        mode="individual",
        training=he.experiment.to_plain(config),
        show_progress=True,
    )
    return {"model": model, "report": report, "seconds": seconds, "data": training.datasets.test}


def _set_aside(folder: pathlib.Path) -> None:
    """Moves what an earlier quickstart left; refuses what is none's before anything is moved."""
    from he_keras.experiment import run_folder

    runs = [folder / head for head in _HEADS if (folder / head).exists()]
    files = [folder / name for name in _FILES if (folder / name).exists()]
    for each in (*runs, *(() if runs else files)):
        if not _is_a_quickstarts(each):
            raise ValueError(
                "The folder holds something else; expected a new folder, or one of an earlier "
                f"quickstart; received {each}: move it, or choose another --output_dir"
            )
    if not runs:
        return
    places = (folder / f"earlier-{number}" for number in itertools.count(1))
    earlier = next(place for place in places if not place.exists())
    with contextlib.ExitStack() as held:
        for run in runs:
            held.enter_context(run_folder.held(run, "trains"))
        earlier.mkdir()
        for each in (*runs, *files):
            each.rename(earlier / each.name)


def _is_a_quickstarts(run: pathlib.Path) -> bool:
    from he_keras import files

    config = run / "config.json"
    return config.exists() and files.read_json(config).get("name") == f"quickstart_{run.name}"


def _load_config():
    from he_keras.experiment.catalog import quickstart_digits

    return quickstart_digits.get_config()


def _table(results: dict) -> list[str]:
    from he_keras.threat import ThreatModel

    header = (
        f"{'':<14}{'clean':>8}{'PGD-20':>9}{'adaptive':>10}{'margin':>9}{'AutoAttack':>12}"
        f"{'training':>11}"
    )
    lines = [header]
    for head, result in results.items():
        report = result["report"]
        robust = [row.robust_accuracy for row in report.rows]
        lines.append(
            f"{_HEADS[head]:<14}{report.clean_accuracy:>8.1%}{robust[0]:>9.1%}{robust[1]:>10.1%}"
            f"{robust[2]:>9.1%}{robust[3]:>12.1%}{result['seconds']:>9.0f} s"
        )
    any_report = next(iter(results.values()))["report"]
    ball = ThreatModel(**any_report.threat).text()
    lines.append(f"(accuracy on {any_report.num_examples} test images; {ball})")
    return lines


def _draw(results: dict, folder: pathlib.Path) -> pathlib.Path:
    from he_keras.evaluation import plot_accuracies

    columns = ("PGD-20", "adaptive PGD-20", "margin PGD-20", "AutoAttack")
    accuracies = {}
    for head, result in results.items():
        report = result["report"]
        robust = zip(columns, (row.robust_accuracy for row in report.rows), strict=True)
        accuracies[_HEADS[head]] = {"clean": report.clean_accuracy, **dict(robust)}
    title = "scikit-learn digits, 360 test images, l_inf, epsilon 0.15"
    return plot_accuracies(accuracies, folder / "result.png", title)


def _reports(best: str, folder: pathlib.Path) -> pathlib.Path:
    """Compares both heads, and copies the better one's report into the folder."""
    from he_keras.evaluation import write_comparison_html

    evaluations = {head: folder / head / "evaluation" for head in _HEADS}
    write_comparison_html(list(evaluations.values()), folder / "comparison.html")
    return pathlib.Path(shutil.copy(evaluations[best] / "report.html", folder / "report.html"))


def _export(head: str, result: dict, folder: pathlib.Path) -> None:
    import he_keras as he

    names = result["data"].class_names
    saved_model = he.export_saved_model(result["model"], folder / "serving" / "digits", names)
    print(f"\nMore robust in the worst case: {_HEADS[head]}")
    print(f"  Keras model: {folder / head / 'model.keras'}")
    print(f"  SavedModel:  {saved_model}")
    sys.stdout.flush()
