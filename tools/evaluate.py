"""Robust accuracy of a trained model, over the whole test set unless told otherwise.

python tools/evaluate.py --run=runs/cifar10_small
python tools/evaluate.py --model=PATH --data=cifar10 --attacks=pgd-20,autoattack --epsilon=8/255

PATH is a .keras file, a run folder or a SavedModel. --attacks=transfer:PATH attacks with images
that were crafted for another model, --attacks=cleverhans:pgd-20 with the cleverhans library.
"""

import pathlib

from absl import flags

from he_keras_tools import cli

_RUN = flags.DEFINE_string("run", None, "Run folder: model, data, threat and attacks come from it.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file, run folder or SavedModel; with --run, in place of the run's."
)
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


def main(_argv) -> None:
    """Loads everything, attacks, prints the table and writes the report."""
    with cli.one_line_errors():
        import he_keras as he
        from he_keras.model_files import load_classifier

        config = _config()
        threat = he.experiment.build_threat(config)
        chosen = he.experiment.build_attacks(
            config, logit_scale=_parse_scale(_LOGIT_SCALE.value), batch_size=_BATCH_SIZE.value
        )
        folder = _output_dir()
        model = load_classifier(_MODEL.value or pathlib.Path(_RUN.value) / "model.keras")
        dataset = he.experiment.load_split(config, "test")
        dataset = dataset.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else dataset
        cli.end_at_once_on_interrupt("Interrupted: no report was written.")
        report = he.evaluate_robustness(
            model, dataset, threat, chosen, folder, _BATCH_SIZE.value, show_progress=True
        )
    print(report.table())
    print(f"Report: {folder / 'report.json'}")


def _config():
    """The run's configuration, or the default one, overridden by flags."""
    from he_keras import experiment

    if not _RUN.value and not _MODEL.value:
        raise ValueError("No model; expected --run=FOLDER or --model=FILE; received neither")
    if not _RUN.value and not _DATA.value:
        raise ValueError("No data set; expected --data=NAME with --model; received none")
    config = experiment.read_config(_RUN.value) if _RUN.value else experiment.default_config()
    with config.unlocked():
        if _DATA.value:
            config.data.update({"name": _DATA.value, "synthetic": False, "test_examples": 0})
        config.data.data_dir = _DATA_DIR.value or config.data.data_dir
        config.threat.norm = _NORM.value or config.threat.norm
        config.threat.epsilon = _EPSILON.value or config.threat.epsilon
        config.evaluation.attacks = tuple(_ATTACKS.value or config.evaluation.attacks)
        config.evaluation.step_size = _STEP_SIZE.value or config.evaluation.step_size
    return config


def _output_dir() -> pathlib.Path:
    if _OUTPUT_DIR.value:
        return pathlib.Path(_OUTPUT_DIR.value)
    return pathlib.Path(_RUN.value or ".") / "evaluation"


def _parse_scale(text: str):
    """Returns a number where it is one; what is neither that nor a name the attacks refuse."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    cli.run(main)
