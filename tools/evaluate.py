"""Robust accuracy of a trained model, over the whole test set unless told otherwise.

python tools/evaluate.py --run=runs/cifar10_small
python tools/evaluate.py --model=PATH --data=cifar10 --attacks=pgd-20,autoattack --epsilon=8/255
python tools/evaluate.py --model=PATH --data=cifar10 --protocol=paper
python tools/evaluate.py --model=PATH --data=cifar10 --output_dir=FOLDER --verify
python tools/evaluate.py --ensemble=RUN/snapshots --data=cifar10
python tools/evaluate.py --compare FOLDER_A FOLDER_B --output_dir=FOLDER
python tools/evaluate.py --transfer PATH_A PATH_B --data=cifar10 --output_dir=FOLDER

PATH is a .keras file, a run folder or a SavedModel. --attacks=transfer:PATH attacks with images
that were crafted for another model, --attacks=cleverhans:pgd-20 with the cleverhans library. The
same command goes on where an interrupted one stopped. --shard=0/4 to --shard=3/4 spread it over
four machines; --merge then makes the report.
"""

import pathlib

from absl import flags

from he_keras_tools import cli

_RUN = flags.DEFINE_string("run", None, "Run folder: model, data, threat and attacks come from it.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file, run folder or SavedModel; with --run, in place of the run's."
)
_ENSEMBLE = flags.DEFINE_list(
    "ensemble", None, "Files, run folders or folders of snapshots: their mean prediction."
)
_DATA = flags.DEFINE_string("data", None, "Data set name or path; default: the run's.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_ATTACKS = flags.DEFINE_list("attacks", None, "Attack names, separated by commas.")
_NORM = flags.DEFINE_string("norm", None, "linf, l2 or l1.")
_EPSILON = flags.DEFINE_string("epsilon", None, "Radius, a number or a fraction such as 8/255.")
_STEP_SIZE = flags.DEFINE_string("step_size", None, "Step of the gradient attacks.")
_LOGIT_SCALE = flags.DEFINE_string("logit_scale", "model", "model, unit, or a number.")
_PROTOCOL = flags.DEFINE_string(
    "protocol", None, "paper, or the name of one: the evaluation settings of a paper's table."
)
_MODE = flags.DEFINE_enum(
    "mode", None, ["survivors", "individual"], "Each attack on what is left, or on every example."
)
_CHECKS = flags.DEFINE_bool("checks", True, "Run the checks of docs/evaluation.md.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 0, "Only the first examples; 0 for all.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 250, "Examples per batch.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the report goes; default: the run.")
_SHARD = flags.DEFINE_string("shard", None, "i/n: attack only the i-th of n parts, from 0 on.")
_MERGE = flags.DEFINE_bool("merge", False, "Attack nothing; make the report of all shards.")
_VERIFY = flags.DEFINE_bool("verify", False, "Score the recorded images of --output_dir again.")
_CORRUPTIONS = flags.DEFINE_string(
    "corruptions", None, "generated, tfds, or the folder of published .npy files: adds them."
)
_COMPARE = flags.DEFINE_bool("compare", False, "Compare the reports in the folders that follow.")
_TRANSFER = flags.DEFINE_bool("transfer", False, "Attack each model that follows with the others.")
# `cli` allows so many arguments that are not flags.
POSITIONAL = 64


def main(arguments) -> None:
    """Loads everything, attacks, prints the table and writes the report."""
    with cli.one_line_errors():
        paths = arguments[1:]
        if _COMPARE.value:
            print(_compare(paths))
        elif _TRANSFER.value:
            print(_transfer(paths))
        elif paths:
            raise ValueError(
                "Paths without --compare or --transfer; expected flags only; received "
                + " ".join(paths)
            )
        elif _VERIFY.value:
            _verify()
        else:
            _evaluate()


def _evaluate() -> None:
    import he_keras as he

    config = _config()
    threat, attacks, mode, protocol = _plan(config)
    folder = _output_dir()
    model = _load_model()
    dataset = _dataset(config)
    cli.end_at_once_on_interrupt("Interrupted: the same command goes on from here.")
    report = he.evaluate_robustness(
        model,
        dataset,
        threat,
        attacks,
        folder,
        _BATCH_SIZE.value,
        mode=_MODE.value or mode,
        checks=_CHECKS.value,
        shard=_shard(),
        merge=_MERGE.value,
        protocol=protocol,
        show_progress=True,
    )
    print(report.table())
    if _SHARD.value:
        print(f"Shard {_SHARD.value} is done; --merge makes the report once all shards are.")
        return
    if _CORRUPTIONS.value:
        print(_add_corruptions(model, dataset, folder))
    print(f"Report: {folder / 'report.html'}")


def _plan(config):
    """Threat model, attacks, mode and text for the headline: the config's, or a protocol's."""
    import he_keras as he

    if not _PROTOCOL.value:
        attacks = he.experiment.build_attacks(
            config, logit_scale=_parse_scale(_LOGIT_SCALE.value), batch_size=_BATCH_SIZE.value
        )
        return he.experiment.build_threat(config), attacks, config.evaluation.mode, None
    given = [flag.name for flag in (_ATTACKS, _NORM, _EPSILON, _STEP_SIZE) if flag.value]
    if _LOGIT_SCALE.value != "model":
        given.append(_LOGIT_SCALE.name)
    if given:
        raise ValueError(
            f"A protocol fixes its settings; expected --protocol={_PROTOCOL.value} without "
            f"{', '.join('--' + name for name in given)}; received both"
        )
    from he_keras.evaluation import protocols

    is_default = _PROTOCOL.value == "paper"
    chosen = (protocols.for_dataset if is_default else protocols.get)(
        config.data.name if is_default else _PROTOCOL.value, _BATCH_SIZE.value
    )
    print(f"Protocol {chosen.name}: {chosen.text}\n{chosen.note}")
    return chosen.threat, chosen.attacks, chosen.mode, chosen.text


def _verify() -> None:
    from he_keras.evaluation import verify

    config = _config()
    found = verify(_load_model(), _dataset(config), _output_dir(), _BATCH_SIZE.value)
    print(found.summary())
    if not found.holds:
        raise SystemExit(1)


def _add_corruptions(model, dataset, folder: pathlib.Path) -> str:
    from he_keras.evaluation import evaluate_corruptions
    from he_keras.evaluation.report_data import add_to_report

    report = evaluate_corruptions(
        model, dataset, source=_CORRUPTIONS.value, data_dir=_DATA_DIR.value, show_progress=True
    )
    add_to_report(folder, corruptions=report.to_json())
    return report.table()


def _compare(folders: list[str]) -> str:
    from he_keras.evaluation import write_comparison_html

    target = pathlib.Path(_OUTPUT_DIR.value or ".") / "comparison.html"
    return f"Comparison: {write_comparison_html(folders, target)}"


def _transfer(paths: list[str]) -> str:
    import he_keras as he
    from he_keras.atomic_files import make_writable
    from he_keras.evaluation import transfer_matrix, write_transfer
    from he_keras.evaluation.report_data import add_to_report
    from he_keras.model_files import load_classifier
    from he_keras_tools.short_names import short_names

    if not _DATA.value:
        raise ValueError("No data set; expected --data=NAME with --transfer; received none")
    config = _config()
    names = _ATTACKS.value or ["pgd-20", "mim-20"]
    if len(set(paths)) != len(paths):
        raise ValueError(f"Models must differ; expected no path twice; received {paths}")
    folder = make_writable(pathlib.Path(_OUTPUT_DIR.value or "."), "the transfer matrices")
    models = dict(zip(short_names(paths), map(load_classifier, paths), strict=True))
    options = {"logit_scale": _parse_scale(_LOGIT_SCALE.value)}
    if _STEP_SIZE.value:
        options["step_size"] = _STEP_SIZE.value
    cli.end_at_once_on_interrupt("Interrupted: nothing was written.")
    matrices = transfer_matrix(
        models,
        _dataset(config),
        he.experiment.build_threat(config),
        names,
        batch_size=_BATCH_SIZE.value,
        show_progress=True,
        **options,
    )
    write_transfer(folder, matrices)
    if (folder / "report.json").exists():
        add_to_report(folder, transfer=matrices[0].to_json())
    return "\n\n".join(matrix.table() for matrix in matrices) + f"\nWritten to {folder}"


def _config():
    """The run's configuration, or the default one, overridden by flags."""
    from he_keras import experiment

    if not (_RUN.value or _MODEL.value or _ENSEMBLE.value or _TRANSFER.value):
        raise ValueError("No model; expected --run=FOLDER or --model=FILE; received neither")
    if _MODEL.value and _ENSEMBLE.value:
        raise ValueError("Two models; expected --model or --ensemble; received both")
    if not _RUN.value and not _DATA.value:
        raise ValueError("No data set; expected --data=NAME with --model; received none")
    config = experiment.read_config(_RUN.value) if _RUN.value else experiment.default_config()
    cli.override_data_and_threat(config, _DATA.value, _DATA_DIR.value, _NORM.value, _EPSILON.value)
    with config.unlocked():
        config.evaluation.attacks = tuple(_ATTACKS.value or config.evaluation.attacks)
        config.evaluation.step_size = _STEP_SIZE.value or config.evaluation.step_size
    return config


def _load_model():
    import he_keras as he
    from he_keras.model_files import load_classifier

    if _ENSEMBLE.value:
        return he.SnapshotEnsemble.from_files(_ENSEMBLE.value)
    return load_classifier(_MODEL.value or pathlib.Path(_RUN.value) / "model.keras")


def _dataset(config):
    from he_keras import experiment

    dataset = experiment.load_split(config, "test")
    return dataset.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else dataset


def _output_dir() -> pathlib.Path:
    if _OUTPUT_DIR.value:
        return pathlib.Path(_OUTPUT_DIR.value)
    return pathlib.Path(_RUN.value or ".") / "evaluation"


def _shard() -> tuple[int, int] | None:
    if not _SHARD.value:
        return None
    index, _, count = _SHARD.value.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise ValueError(f"Invalid --shard; expected i/n such as 0/4; received {_SHARD.value}")
    return int(index), int(count)


def _parse_scale(text: str):
    """Returns a number where it is one; what is neither that nor a name the attacks refuse."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    cli.run(main)
