"""Writes a SavedModel for serving from a run folder or a .keras file.

python tools/export.py --model=runs/cifar10_small/model.keras --output_dir=serving/cifar10
"""

import pathlib

from absl import flags

from he_keras_tools import cli

_MODEL = flags.DEFINE_string("model", None, "A .keras file or a run folder.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the served model.")
_CLASS_NAMES = flags.DEFINE_list("class_names", None, "Names of the classes, in order.")


def main(_argv) -> None:
    """Loads the model and writes the next version."""
    with cli.one_line_errors():
        if not _MODEL.value or not _OUTPUT_DIR.value:
            raise ValueError(
                "Missing flag; expected --model=... and --output_dir=...; received less"
            )
        import he_keras as he

        path = pathlib.Path(_MODEL.value)
        model = he.load_model(path / "model.keras" if path.is_dir() else path)
        folder = he.export_saved_model(model, _OUTPUT_DIR.value, _CLASS_NAMES.value)
    print(f"SavedModel: {folder}")


if __name__ == "__main__":
    cli.run(main)
