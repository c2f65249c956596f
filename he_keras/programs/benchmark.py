"""Measures this machine: `he-keras benchmark NAME [--flags]`.

data: images per second of the input pipeline, and how many training of a small network takes.
attacks: each attack, and those of cleverhans, foolbox, ART and torchattacks on the same weights,
if they are installed (`pip install -e .[bench]`). The model must be a pre-activation ResNet of
he_keras for torchattacks, which gets a PyTorch twin of it.
memory: peak memory of each attack over that of one forward and backward pass of the same batch.
objectives: a training step of LLR, and what its passes take.
training: training steps, those of PyTorch (`pip install -e .[bench]`), and the convolutions alone.
head: training steps with HE and with a linear head, in one process.
tricks: what each trick of he_keras.cpu earns of a PGD-AT step and of PGD-10, in five minutes. With
--rounds=20 it uses all of that time.
profile: where the time of one training step goes, by kinds of operations.
growth: seconds of a step over attack steps and batch sizes, and memory over many steps.
guard: compares ratios with the stored ones; ends with 1 if one has become worse by more than 30 %.
cost: what the papers' CIFAR-10 and ImageNet tables take, by counted operations
(docs/research/cost.md).
serving: requests that he-keras serve answers, and what the model alone computes. --model is the
folder of an exported model's versions. It needs the program wrk.
"""

import importlib.util
import pathlib

from absl import flags

from he_keras.arguments import unknown_name
from he_keras.programs import cli

_SECONDS = flags.DEFINE_float("seconds", 4.0, "data: seconds for each measurement.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per batch.")
_MODEL = flags.DEFINE_string("model", None, "attacks: a run folder or a .keras file.")
_DATA = flags.DEFINE_string("data", "cifar10", "attacks: data set name or path.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "attacks: folder of prepared TFDS data sets.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 256, "attacks: test images to attack.")
_ATTACKS = flags.DEFINE_list("attacks", ["fgsm", "pgd-20", "mim-20"], "attacks: names.")
_EPSILON = flags.DEFINE_string("epsilon", "8/255", "attacks: radius in the l_inf norm.")
_OBJECTIVES = flags.DEFINE_list(
    "objectives", ["pgd_at", "trades", "free_at", "fast_at"], "training: training frameworks."
)
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "mixed_bfloat16"], "training: dtype policies.")
_NETWORKS = flags.DEFINE_list("networks", ["preact-resnet-18"], "training: networks.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["64", "128"], "training: examples per batch.")
_TOOLS = flags.DEFINE_list(
    "tools",
    ["he_keras-linear", "convolutions", "torch:eager", "torch:channels-last"],
    "training: what he_keras is compared with; also he_keras-arc (m-HE), torch:compile, "
    "torch:channels-last+compile.",
)
_OUTPUT = flags.DEFINE_string("output", None, "training, growth, guard: JSON file to write.")
_PICTURE = flags.DEFINE_string("picture", None, "growth: PNG file to write.")
_QUICK = flags.DEFINE_bool("quick", False, "guard: a minute, on a small network, no PyTorch.")
_STORE = flags.DEFINE_bool("store", False, "guard: makes what was measured the stored ratios.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "Interleaved rounds; head: the more, the surer.", lower_bound=1
)
_TFLOPS = flags.DEFINE_float("tflops", 50.0, "cost: assumed speed of a device, in 10^12/s.")
# How many arguments without a flag `cli` allows.
POSITIONAL = 1


def main(arguments) -> None:
    """Runs the benchmark that the command line names."""
    with cli.one_line_errors():
        print(_BENCHMARKS[arguments[1]]())


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError unless a benchmark is named."""
    name = arguments[1] if len(arguments) > 1 else "none"
    if name not in _BENCHMARKS:
        raise unknown_name("benchmark", name, _BENCHMARKS)


def _data() -> str:
    from he_keras.benchmarks import pipeline

    return pipeline.measure(_SECONDS.value, _BATCH_SIZE.value)


def _attacks() -> str:
    import he_keras as he
    from he_keras.benchmarks import attacks

    path = pathlib.Path(_model_path())
    model = he.load_model(path / "model.keras" if path.is_dir() else path)
    images, labels = _examples(_NUM_EXAMPLES.value)
    settings = _threat(), _ATTACKS.value, _ROUNDS.value, _BATCH_SIZE.value
    return attacks.measure(model, images, labels, *settings)


def _memory() -> str:
    from he_keras.benchmarks import memory

    path = _model_path()
    images, labels = _examples(_BATCH_SIZE.value)
    return memory.measure(path, images, labels, _threat(), _ATTACKS.value)


def _objectives() -> str:
    from he_keras.benchmarks import objectives

    return objectives.measure(batch_size=_BATCH_SIZE.value)


def _cells() -> list:
    from he_keras.benchmarks import training

    batch_sizes = [int(each) for each in _BATCH_SIZES.value]
    return training.cells(_OBJECTIVES.value, _DTYPES.value, _NETWORKS.value, batch_sizes)


def _head() -> str:
    from he_keras.benchmarks import head

    return head.measure(_cells(), _ROUNDS.value)


def _tricks() -> str:
    from he_keras.benchmarks import tricks

    return tricks.measure(_NETWORKS.value[0], _DTYPES.value, _ROUNDS.value)


def _profile() -> str:
    from he_keras.benchmarks import profile

    return "\n\n".join(profile.measure(cell) for cell in _cells())


def _training() -> str:
    from he_keras.benchmarks import training

    wanted = _cells()
    return training.measure(wanted, [training.OURS, *_TOOLS.value], _ROUNDS.value, _OUTPUT.value)


def _serving() -> str:
    from he_keras.benchmarks import serving

    return serving.measure(_model_path(), _SECONDS.value, _ROUNDS.value, _BATCH_SIZE.value)


def _growth() -> str:
    from he_keras.benchmarks import growth
    from he_keras.environment import environment
    from he_keras.files import write_json

    found = growth.measure(_NETWORKS.value[0], _DTYPES.value[0], _ROUNDS.value)
    if _OUTPUT.value:
        write_json(pathlib.Path(_OUTPUT.value), {"environment": environment(), **found.to_dict()})
    if _PICTURE.value:
        growth.draw(found, pathlib.Path(_PICTURE.value))
    return found.table()


def _guard() -> str:
    from he_keras.benchmarks import guard
    from he_keras.environment import environment
    from he_keras.files import write_json

    peers = [tool for tool in _TOOLS.value if tool.startswith("torch:")]
    if _QUICK.value or importlib.util.find_spec("torch") is None:
        peers = []
    ratios = guard.measure(_QUICK.value, peers, _ROUNDS.value)
    if _OUTPUT.value:
        write_json(pathlib.Path(_OUTPUT.value), {"environment": environment(), "ratios": ratios})
    if _STORE.value:
        guard.store(ratios)
    worse = guard.regressions(ratios, guard.stored_ratios())
    if worse:
        cli.fail("Slower than stored: " + "; ".join(worse), exit_code=1)
    return f"{len(ratios)} ratios, none worse than stored by more than {guard.TOLERANCE:.0%}"


def _cost() -> str:
    from he_keras.benchmarks import cost

    return cost.table(_TFLOPS.value, _BATCH_SIZE.value, _ROUNDS.value)


def _model_path() -> str:
    if not _MODEL.value:
        raise ValueError("No model; expected --model=FOLDER_OR_FILE; received none")
    return _MODEL.value


def _examples(count: int):
    import he_keras as he

    dataset = he.data.load(_DATA.value, "test", data_dir=_DATA_DIR.value)
    if not isinstance(dataset, he.data.ImageDataset):
        raise ValueError(f"No small images; expected up to 64 pixels; received {_DATA.value}")
    return dataset.take(count).as_float()


def _threat():
    import he_keras as he

    return he.ThreatModel("linf", _EPSILON.value)


_BENCHMARKS = {
    "data": _data,
    "attacks": _attacks,
    "memory": _memory,
    "objectives": _objectives,
    "training": _training,
    "head": _head,
    "tricks": _tricks,
    "profile": _profile,
    "serving": _serving,
    "growth": _growth,
    "guard": _guard,
    "cost": _cost,
}
