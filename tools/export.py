"""Writes a model for serving: a SavedModel with a model card, and other formats if asked for.

python tools/export.py --run=runs/cifar10_small --output_dir=serving/cifar10 --calibrate
python tools/export.py --run=runs/cifar10_small --output_dir=serving/cifar10 --formats=litert,onnx
python tools/export.py --model=PATH.keras --output_dir=serving/mine --class_names=cat,dog

Each call writes the next version, serving/cifar10/1, 2, ... Data, settings and evaluation of a run
go into the model card. What else is converted lies in assets.extra/conversions of the version.
"""

import pathlib

from absl import flags

from he_keras_tools import cli, interrupts

_RUN = flags.DEFINE_string("run", None, "Run folder: model, data and evaluation come from it.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file or a run folder; with --run, in place of the run's model."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the served model.")
_CLASS_NAMES = flags.DEFINE_list("class_names", None, "Names of the classes, in order.")
_FORMATS = flags.DEFINE_list(
    "formats", ["saved_model"], "saved_model (always written), litert, litert-int8, ..., onnx."
)
_CALIBRATE = flags.DEFINE_bool(
    "calibrate", False, "Fit the temperature of the probabilities on the run's validation images."
)
_TOP_K = flags.DEFINE_integer("top_k", None, "Classes in scores and labels; default: all.")
_EVALUATION = flags.DEFINE_string(
    "evaluation", None, "Folder of the report for the model card; default: the run's evaluation."
)
_DATA = flags.DEFINE_string("data", None, "Data set to score conversions on; default: the run's.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_NORM = flags.DEFINE_string("norm", None, "linf, l2 or l1.")
_EPSILON = flags.DEFINE_string("epsilon", None, "Radius, a number or a fraction such as 8/255.")
_ATTACK = flags.DEFINE_string("attack", "default", "Attack that conversions are scored with.")
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", 500, "Test images that conversions are scored on; 0 for all."
)
_MAX_LOSS = flags.DEFINE_float("max_loss", 0.01, "Loss of accuracy that flags a conversion.")


def main(_argv) -> None:
    """Loads the model and what is known of it, and writes the next version."""
    with cli.one_line_errors():
        if not _OUTPUT_DIR.value or not (_RUN.value or _MODEL.value):
            raise ValueError(
                "Missing flag; expected --model=... and --output_dir=..., or --run=... in place of "
                "--model; received less"
            )
        _export()


def _export() -> None:
    import he_keras as he
    from he_keras.export import calibrate
    from he_keras.export.card_page import conversion_summary
    from he_keras.model_files import load_classifier

    run = _run_folder()
    config = _config(run)
    plan = _plan(config, run)
    held_out = _validation(config, run) if _CALIBRATE.value else None
    provenance = _provenance(run, config)
    model = load_classifier(_MODEL.value or run)
    calibration = calibrate(model, held_out) if held_out else None
    # Lost on its way while the model was loaded or run; from here on the export looks itself.
    if interrupts.was_asked():
        raise KeyboardInterrupt
    folder = he.export_saved_model(
        model,
        _OUTPUT_DIR.value,
        _CLASS_NAMES.value or (_class_names(config) if run or _DATA.value else None),
        top_k=_TOP_K.value,
        calibration=calibration,
        conversions=plan,
        provenance=provenance,
    )
    print(f"SavedModel: {folder}")
    if calibration:
        print(f"Calibrated: {calibration.summary()}")
    if plan:
        print(conversion_summary(folder))


def _run_folder() -> pathlib.Path | None:
    """The run that is exported, if there is one."""
    if _RUN.value:
        return pathlib.Path(_RUN.value)
    model = pathlib.Path(_MODEL.value)
    return model if (model / "config.json").is_file() else None


def _config(run: pathlib.Path | None):
    """The run's configuration, or the default one, overridden by flags."""
    from he_keras import experiment

    config = experiment.read_config(run) if run else experiment.default_config()
    cli.override_data_and_threat(config, _DATA.value, _DATA_DIR.value, _NORM.value, _EPSILON.value)
    return config


def _plan(config, run: pathlib.Path | None):
    """What to convert to, and on what to score it; None for a SavedModel alone."""
    from he_keras import experiment
    from he_keras.export import ConversionPlan
    from he_keras.export.conversions import parse_formats

    asked = [name for name in _FORMATS.value if name != "saved_model"]
    if not asked:
        return None
    names = parse_formats(asked)
    if not (run or _DATA.value):
        raise ValueError(
            "Nothing to score the conversions on; expected --run=FOLDER or --data=NAME; received "
            f"--formats={','.join(_FORMATS.value)} alone"
        )
    if _NUM_EXAMPLES.value < 0:
        raise ValueError(
            "Invalid --num_examples; expected a positive number, or 0 for all; received "
            f"--num_examples={_NUM_EXAMPLES.value}"
        )
    test = experiment.load_split(config, "test")
    return ConversionPlan(
        names,
        test.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else test,
        experiment.load_split(config, "train") if "litert-int8" in names else None,
        experiment.build_threat(config),
        _ATTACK.value,
        _MAX_LOSS.value,
    )


def _validation(config, run: pathlib.Path | None):
    """Images that were held out of the run's training."""
    from he_keras import experiment

    if run is None or _DATA.value:
        raise ValueError(
            "Calibration takes images that were held out of training; expected --run=FOLDER "
            "without --data; received "
            + (f"--data={_DATA.value}" if run else f"--model={_MODEL.value} alone")
        )
    dataset = experiment.load_split(config, "validation")
    if dataset is None:
        raise ValueError(
            "Nothing was held out of training; expected a run with data.validation_examples above "
            f"0; received {run}"
        )
    return dataset


def _class_names(config) -> tuple[str, ...] | None:
    """The data set's, where it is known or at hand."""
    from he_keras import data, experiment

    facts = data.FACTS.get(config.data.name)
    if config.data.synthetic or (facts and facts.class_names):
        return facts.class_names if facts and not config.data.synthetic else None
    try:
        return experiment.load_split(config, "test").class_names
    except data.DatasetNotFoundError:
        return None


def _provenance(run: pathlib.Path | None, config):
    from he_keras import experiment
    from he_keras.experiment.run_folder import read_json
    from he_keras.export import Provenance

    folder = pathlib.Path(_EVALUATION.value) if _EVALUATION.value else run and run / "evaluation"
    path = folder and folder / "report.json"
    # A run need not have been evaluated; a folder that was named must have a report.
    is_there = bool(path) and (path.exists() or bool(_EVALUATION.value))
    return Provenance(
        source=str(_MODEL.value or run),
        config=experiment.to_plain(experiment.read_config(run)) if run else None,
        report=read_json(path) if is_there else None,
        report_file=str(path) if is_there else None,
    )


if __name__ == "__main__":
    cli.run(main)
