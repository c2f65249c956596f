"""Says what this machine has, how fast it is, and what is wrong with the installation.

he-keras doctor
he-keras doctor --nospeed

It shows versions, devices, data sets and known problems. The speed check trains a small network,
for about ten seconds on an idle machine. It compares the time of a step with that of its
convolutions alone. This ratio differs little between machines, so a stored one stands beside it.
The exit code is 1 if there is a problem. Please send the output with a report of a fault.
"""

import os
import pathlib
import platform
import shutil
import sys

from absl import flags

from he_keras.programs import cli

_SPEED = flags.DEFINE_bool("speed", True, "Measure the speed too; --nospeed takes no time.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_CELL = "preact-resnet-small pgd_at float32 share_of_bound"
_ROUNDS = 3


def main(_argv) -> None:
    """Prints the findings, and ends with 1 if there is a problem."""
    import he_keras as he
    from he_keras import cpu, requirements

    found = requirements.packages()
    print(f"he_keras {he.__version__} in {pathlib.Path(he.__file__).parent}")
    print(f"Python {platform.python_version()} in {sys.executable}, {platform.platform()}")
    print(f"Packages:\n{requirements.table(found)}" if found else "Packages: not installed by pip")
    print(f"Devices:\n{_devices()}")
    print(f"Data sets:\n{_data_sets()}")
    problems = [*requirements.problems(found), *_version_problems(), *_machine_problems()]
    if not cpu.is_enabled():
        print("note: HE_KERAS_CPU_TUNING=0 turns off what is faster on a CPU")
    if _SPEED.value:
        with cli.one_line_errors():
            print(f"Speed:\n{_speed()}")
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "No known problem.")
    if problems:
        raise SystemExit(1)


def _devices() -> str:
    import tensorflow as tf

    lines = [f"  {os.cpu_count()} CPU cores"]
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        lines.append(f"  {device.name} {details.get('device_name', '')}".rstrip())
    return "\n".join(lines)


def _data_sets() -> str:
    """What is found without a network: digits, and what TFDS has prepared."""
    folder = _tfds_folder()
    if not folder.is_dir():
        return f"  digits (in scikit-learn)\n  no folder of prepared TFDS data sets: {folder}"
    prepared = sorted(each.parent.parent.name for each in folder.glob("*/*/dataset_info.json"))
    nested = sorted(each.parents[2].name for each in folder.glob("*/*/*/dataset_info.json"))
    names = ", ".join(dict.fromkeys([*prepared, *nested])) or "none"
    return f"  digits (in scikit-learn)\n  prepared by TFDS in {folder}: {names}"


def _tfds_folder() -> pathlib.Path:
    given = _DATA_DIR.value or os.environ.get("TFDS_DATA_DIR")
    return pathlib.Path(given or "~/tensorflow_datasets").expanduser()


def _version_problems() -> list[str]:
    """An installation of another version than the code that runs."""
    import he_keras as he
    from he_keras import requirements

    version = requirements.installed_version()
    if version in (None, he.__version__):
        return []
    return [
        f"pip knows another version; expected {he.__version__}, as the code says; received "
        f"{version}: run pip install again"
    ]


def _machine_problems() -> list[str]:
    """A folder that hides the package, and a GPU that TensorFlow does not see."""
    import tensorflow as tf

    import he_keras as he

    found, here = [], pathlib.Path.cwd() / "he_keras"
    if here.is_dir() and here.resolve() != pathlib.Path(he.__file__).resolve().parent:
        found.append(f"The folder {here} hides the package from Python started here: rename it")
    if shutil.which("nvidia-smi") and not tf.config.list_physical_devices("GPU"):
        found.append(
            "There is an NVIDIA driver, but TensorFlow sees no GPU: pip install 'he_keras[gpu]'"
        )
    return found


def _speed() -> str:
    """A training step, and its ratio beside the stored one."""
    from he_keras.benchmarks import guard, training

    network, objective, dtype, _ = _CELL.split()
    cell = training.Cell(objective, dtype, network, 64)
    result = training.measure_cell(cell, [training.OURS, training.BOUND], _ROUNDS)
    ours = result.seconds[training.OURS]
    stored = guard.stored_ratios()[_CELL]
    lines = [
        f"  PGD-AT, small network, batch of 64: {ours:.3f} s a step, {64 / ours:.0f} images/s",
        f"  its convolutions alone take {result.share_of_bound:.2f} of that, stored {stored:.2f}",
    ]
    if guard.regressions({_CELL: result.share_of_bound}, {_CELL: stored}):
        lines.append(
            "  much slower than stored: are other programs running? "
            "he-keras benchmark guard --quick measures more"
        )
    return "\n".join(lines)
