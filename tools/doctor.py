"""`he-keras doctor`, with the code of this repository whatever is installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import he_keras_cli  # noqa: E402

if __name__ == "__main__":
    he_keras_cli.main("doctor")
