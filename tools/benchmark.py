"""Measures this machine: `python tools/benchmark.py data|attacks|memory|objectives [--flags]`.

data: images per second of the input pipeline beside what training of a small network takes.
attacks: each attack beside cleverhans, foolbox, ART and torchattacks on the same weights, whichever
of them are installed (`pip install -e .[bench]`). The model must be a pre-activation ResNet of
he_keras for torchattacks, which gets a PyTorch twin of it.
memory: peak memory of each attack beside one forward and backward pass of the same batch.
objectives: a training step of LLR beside what its passes take.
"""

import pathlib

from absl import flags

from he_keras_tools import cli

_SECONDS = flags.DEFINE_float("seconds", 4.0, "data: seconds for each measurement.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per batch.")
_MODEL = flags.DEFINE_string("model", None, "attacks: a run folder or a .keras file.")
_DATA = flags.DEFINE_string("data", "cifar10", "attacks: data set name or path.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "attacks: folder of prepared TFDS data sets.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 256, "attacks: test images to attack.")
_ATTACKS = flags.DEFINE_list("attacks", ["fgsm", "pgd-20", "mim-20"], "attacks: names.")
_EPSILON = flags.DEFINE_string("epsilon", "8/255", "attacks: radius in the l_inf norm.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "attacks: interleaved rounds; the best counts.")
_BENCHMARKS = ("data", "attacks", "memory", "objectives")
# `cli` allows so many arguments that are not flags.
POSITIONAL = 1


def main(arguments) -> None:
    """Runs the benchmark named on the command line."""
    if len(arguments) != 2 or arguments[1] not in _BENCHMARKS:
        cli.fail(f"Unknown benchmark; expected one of {_BENCHMARKS}; received {arguments[1:]}")
    with cli.one_line_errors():
        measures = (_data, _attacks, _memory, _objectives)
        print(dict(zip(_BENCHMARKS, measures, strict=True))[arguments[1]]())


def _data() -> str:
    from he_keras_tools.benchmarks import pipeline

    return pipeline.measure(_SECONDS.value, _BATCH_SIZE.value)


def _attacks() -> str:
    import he_keras as he
    from he_keras_tools.benchmarks import attacks

    path = pathlib.Path(_model_path())
    model = he.load_model(path / "model.keras" if path.is_dir() else path)
    images, labels = _examples(_NUM_EXAMPLES.value)
    settings = _threat(), _ATTACKS.value, _ROUNDS.value, _BATCH_SIZE.value
    return attacks.measure(model, images, labels, *settings)


def _memory() -> str:
    from he_keras_tools.benchmarks import memory

    path = _model_path()
    images, labels = _examples(_BATCH_SIZE.value)
    return memory.measure(path, images, labels, _threat(), _ATTACKS.value)


def _objectives() -> str:
    from he_keras_tools.benchmarks import objectives

    return objectives.measure(batch_size=_BATCH_SIZE.value)


def _model_path() -> str:
    if not _MODEL.value:
        raise ValueError("No model; expected --model=FOLDER_OR_FILE; received none")
    return _MODEL.value


def _examples(count: int):
    import he_keras as he

    return he.data.load(_DATA.value, "test", data_dir=_DATA_DIR.value).take(count).as_float()


def _threat():
    import he_keras as he

    return he.ThreatModel("linf", _EPSILON.value)


if __name__ == "__main__":
    cli.run(main)
