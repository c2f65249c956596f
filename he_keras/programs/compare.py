"""Puts the reports of several evaluations on one page.

he-keras compare runs/a/evaluation runs/b/evaluation --output_dir=runs

The page is comparison.html in --output_dir.
"""

import pathlib

from absl import flags

from he_keras.programs import cli

_OUTPUT_DIR = flags.DEFINE_string("output_dir", ".", "Folder of comparison.html.")
# How many arguments without a flag `cli` allows.
POSITIONAL = 64


def main(arguments) -> None:
    """Writes the page."""
    from he_keras.evaluation import write_comparison_html

    with cli.one_line_errors():
        target = pathlib.Path(_OUTPUT_DIR.value) / "comparison.html"
        print(f"Comparison: {write_comparison_html(arguments[1:], target)}")
