"""Writes a model for serving: a SavedModel with a model card, and other formats if asked for.

he-keras export --run=runs/cifar10_small --output_dir=serving/cifar10 --calibrate
he-keras export --run=runs/cifar10_small --output_dir=serving/cifar10 --formats=litert,onnx
he-keras export --model=PATH.keras --output_dir=serving/mine --class_names=cat,dog
he-keras export --model=PATH.keras --output_dir=Mine2026 --format=torch-robustbench

Each call writes the next version, serving/cifar10/1, 2, ... Data, settings and evaluation of a run
go into the model card. What else is converted lies in assets.extra/conversions of the version.
"""

import pathlib

from absl import flags

from he_keras.files import check_model_exists
from he_keras.programs import cli, model_flags

_RUN = flags.DEFINE_string("run", None, "Run folder: model, data and evaluation come from it.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file or a run folder; with --run, in place of the run's model."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the served model.")
_CLASS_NAMES = flags.DEFINE_list("class_names", None, "Names of the classes, in order.")
_FORMATS = flags.DEFINE_list(
    "formats", ["saved_model"], "saved_model (always written), litert, litert-int8, ..., onnx."
)
flags.DEFINE_alias("format", "formats")
_NAME = flags.DEFINE_string("name", None, "Of a torch-robustbench file; default: the folder's.")
_CALIBRATE = flags.DEFINE_bool(
    "calibrate", False, "Fit the temperature of the probabilities on the run's validation images."
)
_TOP_K = flags.DEFINE_integer("top_k", None, "Classes in scores and labels; default: all.")
_EVALUATION = flags.DEFINE_string(
    "evaluation", None, "Folder of the report for the model card; default: the run's evaluation."
)
_ATTACK = flags.DEFINE_string("attack", "default", "Attack that conversions are scored with.")
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", 500, "Test images that conversions are scored on; 0 for all."
)
_MAX_LOSS = flags.DEFINE_float("max_loss", 0.01, "Loss of accuracy that flags a conversion.")
flags.adopt_module_key_flags(model_flags)
_ROBUSTBENCH = "torch-robustbench"


def main(_argv) -> None:
    """Loads the model and the facts about it, and writes the next version."""
    with cli.one_line_errors():
        if _ROBUSTBENCH in _FORMATS.value:
            _export_robustbench()
        else:
            _export()


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError unless the flags name a model that is there, and a folder."""
    if not _OUTPUT_DIR.value or not (_RUN.value or _MODEL.value):
        raise ValueError(
            "Missing flag; expected --model=... and --output_dir=..., or --run=... in place of "
            "--model; received less"
        )
    check_model_exists(_MODEL.value or _RUN.value)


def _export() -> None:
    import he_keras as he
    from he_keras.export import calibrate
    from he_keras.export.card_page import conversion_summary
    from he_keras.export.conversions import parse_formats
    from he_keras.model_files import load_classifier

    run = _run_folder()
    config = _config(run)
    if _conversions():
        parse_formats(_conversions())
    held_out = _validation(config, run) if _CALIBRATE.value else None
    provenance = _provenance(run, config)
    model, done = model_flags.as_classifier(
        load_classifier(_MODEL.value or run), _clean(config, run)
    )
    if done:
        print(done)
    plan = _plan(config, run, model)
    bounds = model_flags.pixels_of([model])
    calibration = calibrate(model, held_out, bounds=bounds) if held_out else None
    # Ctrl-C may have been lost while the model was loaded. From here on the export checks itself.
    if cli.was_interrupted():
        raise KeyboardInterrupt
    folder = he.export_saved_model(
        model,
        _OUTPUT_DIR.value,
        _CLASS_NAMES.value or (_class_names(config) if run or model_flags.DATA.value else None),
        top_k=_TOP_K.value,
        calibration=calibration,
        conversions=plan,
        provenance=provenance,
        bounds=bounds,
    )
    print(f"SavedModel: {folder}")
    if calibration:
        print(f"Calibrated: {calibration.summary()}")
    if plan:
        print(conversion_summary(folder))


def _clean(config, run: pathlib.Path | None):
    """Clean images of an ordinary classifier, where --data names some."""
    from he_keras import experiment

    return experiment.load_split(config, "test") if model_flags.DATA.value and not run else None


def _export_robustbench() -> None:
    """Writes the files of a submission to RobustBench, and no SavedModel."""
    from he_keras.export import export_robustbench
    from he_keras.files import read_json
    from he_keras.model_files import load_classifier

    if _FORMATS.value != [_ROBUSTBENCH]:
        raise ValueError(
            f"{_ROBUSTBENCH} is no form of a served model; expected --format={_ROBUSTBENCH} alone; "
            f"received {','.join(_FORMATS.value)}"
        )
    run = _run_folder()
    folders = _EVALUATION.value.split(",") if _EVALUATION.value else []
    if not folders and run and (run / "evaluation" / "report.json").exists():
        folders = [str(run / "evaluation")]
    reports = [read_json(pathlib.Path(folder) / "report.json") for folder in folders]
    folder = pathlib.Path(_OUTPUT_DIR.value)
    name = _NAME.value or folder.name
    model = load_classifier(_MODEL.value or run)
    layout = export_robustbench(model, folder, name, reports, _config(run).data.name)
    print(f"Layout: {layout.recipe.name}, {layout.network}")
    print(f"Files: {folder}/{name}.pt, .safetensors, .json and _issue.md")


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
    model_flags.override_data(config)
    return config


def _conversions() -> list[str]:
    return [name for name in _FORMATS.value if name != "saved_model"]


def _plan(config, run: pathlib.Path | None, model):
    """What to convert to, and on what to score it; None for a SavedModel alone."""
    from he_keras import experiment
    from he_keras.export import ConversionPlan
    from he_keras.export.conversions import parse_formats

    if not _conversions():
        return None
    names = parse_formats(_conversions())
    if not (run or model_flags.DATA.value):
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
    threat, remark = model_flags.threat_of(config, [model], bool(run))
    if remark:
        print(remark)
    return ConversionPlan(
        names,
        test.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else test,
        experiment.load_split(config, "train") if "litert-int8" in names else None,
        threat,
        _ATTACK.value,
        _MAX_LOSS.value,
    )


def _validation(config, run: pathlib.Path | None):
    """Images that were held out of the run's training."""
    from he_keras import experiment

    if run is None or model_flags.DATA.value:
        raise ValueError(
            "Calibration takes images that were held out of training; expected --run=FOLDER "
            "without --data; received "
            + (f"--data={model_flags.DATA.value}" if run else f"--model={_MODEL.value} alone")
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
        # A run's data may be one set without test images.
        return experiment.load_split(
            config, "test" if model_flags.DATA.value else "train"
        ).class_names
    except data.DatasetNotFoundError:
        return None


def _provenance(run: pathlib.Path | None, config):
    from he_keras import experiment
    from he_keras.export import Provenance
    from he_keras.files import read_json

    path = None
    # A folder that was named must have a report; a run need not have been evaluated.
    if _EVALUATION.value:
        path = pathlib.Path(_EVALUATION.value) / "report.json"
    elif run and (run / "evaluation" / "report.json").exists():
        path = run / "evaluation" / "report.json"
    return Provenance(
        source=str(_MODEL.value or run),
        config=experiment.to_plain(experiment.read_config(run)) if run else None,
        report=read_json(path) if path else None,
        report_file=str(path) if path else None,
    )
