"""Robust accuracy of a trained model, over the whole test set unless told otherwise.

python tools/evaluate.py --run=runs/cifar10_small
python tools/evaluate.py --model=model.keras --data=cifar10 --attacks=pgd-20,cw-linf-20
--epsilon=8/255
"""

import pathlib

from absl import flags

from he_keras_tools import cli

_RUN = flags.DEFINE_string("run", None, "Run folder: model, data, threat and attacks come from it.")
_MODEL = flags.DEFINE_string("model", None, "A .keras file; with --run, another file of that run.")
_DATA = flags.DEFINE_string("data", None, "Data set name or path; default: the run's.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_ATTACKS = flags.DEFINE_list("attacks", None, "Attack names, separated by commas.")
_NORM = flags.DEFINE_string("norm", None, "linf, l2 or l1.")
_EPSILON = flags.DEFINE_string("epsilon", None, "Radius, a number or a fraction such as 8/255.")
_STEP_SIZE = flags.DEFINE_string("step_size", None, "Step of the gradient attacks.")
_LOGIT_SCALE = flags.DEFINE_string("logit_scale", "model", "model, unit, or a number.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 0, "Only the first examples; 0 for all.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 250, "Examples per batch.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the report goes; default: the run.")

_DEFAULTS = {
    "data": {"name": None, "data_dir": ""},
    "threat": {"norm": "linf", "epsilon": "8/255"},
    "evaluation": {"attacks": ("pgd-20", "cw-linf-20"), "step_size": ""},
}


def main(_argv) -> None:
    """Loads everything, attacks, prints the table and writes the report."""
    with cli.one_line_errors():
        settings, model_path, output_dir = _resolve()
        import he_keras as he

        threat = he.ThreatModel(settings["norm"], settings["epsilon"])
        options = {"logit_scale": _parse_scale(_LOGIT_SCALE.value)}
        if settings["step_size"]:
            options["step_size"] = settings["step_size"]
        chosen = [_attack(name, threat, options) for name in settings["attacks"]]
        dataset = he.data.load(settings["data"], "test", settings["data_dir"] or None)
        dataset = dataset.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else dataset
        model = he.load_model(model_path)
    report = he.evaluate_robustness(model, dataset, threat, chosen, output_dir, show_progress=True)
    print(report.table())
    print(f"Report: {output_dir / 'report.json'}")


def _attack(name, threat, options):
    from he_keras import attacks

    takes_step = name != "fgsm"
    chosen = {key: value for key, value in options.items() if key != "step_size" or takes_step}
    return attacks.get(name, threat, batch_size=_BATCH_SIZE.value, **chosen)


def _resolve():
    """Settings of the run, overridden by flags."""
    from he_keras.experiment import configuration

    if not _RUN.value and not _MODEL.value:
        raise ValueError("No model; expected --run=FOLDER or --model=FILE; received neither")
    run = _DEFAULTS
    if _RUN.value:
        run = configuration.read_config(pathlib.Path(_RUN.value) / "config.json")
    data_name = _DATA.value or run["data"]["name"]
    if data_name is None:
        raise ValueError("No data set; expected --data=NAME with --model; received none")
    settings = {
        "data": data_name,
        "data_dir": _DATA_DIR.value or run["data"]["data_dir"],
        "norm": _NORM.value or run["threat"]["norm"],
        "epsilon": _EPSILON.value or run["threat"]["epsilon"],
        "attacks": tuple(_ATTACKS.value or run["evaluation"]["attacks"]),
        "step_size": _STEP_SIZE.value or run["evaluation"]["step_size"],
    }
    model_path = pathlib.Path(_MODEL.value or pathlib.Path(_RUN.value) / "model.keras")
    folder = pathlib.Path(_RUN.value) / "evaluation" if _RUN.value else pathlib.Path("evaluation")
    return settings, model_path, pathlib.Path(_OUTPUT_DIR.value or folder)


def _parse_scale(text: str):
    return text if text in ("model", "unit") else float(text)


if __name__ == "__main__":
    cli.run(main)
