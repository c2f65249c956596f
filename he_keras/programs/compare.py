"""Compares several evaluations on the console and on one page, by seed and by example.

he-keras compare runs/a runs/b --output_dir=runs
he-keras compare runs/he-* runs/linear-* --output_dir=runs

It takes run folders, and folders that evaluations wrote elsewhere. The page is comparison.html in
--output_dir, and comparison.json has its numbers. Runs whose configurations differ in their seed
only are averaged, and paired with the runs of another configuration by their seeds.
"""

import pathlib

from absl import flags

from he_keras.programs import cli

_OUTPUT_DIR = flags.DEFINE_string("output_dir", ".", "Folder of comparison.html.")
# How many arguments without a flag `cli` allows.
POSITIONAL = 64


def main(arguments) -> None:
    """Prints the comparison and writes the page."""
    from he_keras.evaluation import compare, write_comparison_html

    with cli.one_line_errors():
        target = pathlib.Path(_OUTPUT_DIR.value) / "comparison.html"
        comparison = compare(arguments[1:])
        page = write_comparison_html(comparison, target)
    print(f"{comparison.table()}\nComparison: {page}")
