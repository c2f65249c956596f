"""The flags that `evaluate`, `merge`, `verify` and `transfer` share, and what they stand for."""

import pathlib

from absl import flags

from he_keras.programs import model_flags

RUN = flags.DEFINE_string("run", None, "Run folder: model, data, threat and attacks come from it.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file, run folder or SavedModel; with --run, in place of the run's."
)
_ENSEMBLE = flags.DEFINE_list(
    "ensemble", None, "Files, run folders or folders of snapshots: their mean prediction."
)
ATTACKS = flags.DEFINE_list("attacks", None, "Attack names, separated by commas.")
STEP_SIZE = flags.DEFINE_string("step_size", None, "Step of the gradient attacks.")
LOGIT_SCALE = flags.DEFINE_string("logit_scale", "model", "model, unit, or a number.")
PROTOCOL = flags.DEFINE_string(
    "protocol", None, "paper, or the name of one: the evaluation settings of a paper's table."
)
MODE = flags.DEFINE_enum(
    "mode", None, ["survivors", "individual"], "Each attack on what is left, or on every example."
)
CHECKS = flags.DEFINE_bool(
    "checks", None, "Run the checks of docs/evaluation.md; default: yes, but not to merge shards."
)
PANEL = flags.DEFINE_bool(
    "panel", None, "Run the panel of a cosine head; default: where the checks run."
)
CORRUPTIONS = flags.DEFINE_string(
    "corruptions", None, "generated, tfds, or the folder of published .npy files: adds them."
)
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 0, "Only the first examples; 0 for all.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 250, "Examples per batch.")
OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the report goes; default: the run.")
flags.adopt_module_key_flags(model_flags)


def configuration():
    """The run's configuration, or the default one, overridden by flags."""
    from he_keras import experiment

    config = experiment.read_config(RUN.value) if RUN.value else experiment.default_config()
    model_flags.override_data(config)
    with config.unlocked():
        config.evaluation.attacks = tuple(ATTACKS.value or config.evaluation.attacks)
        config.evaluation.step_size = STEP_SIZE.value or config.evaluation.step_size
    return config


def check_one_model() -> None:
    """Raises a ValueError unless the flags name one model and its data."""
    if not (RUN.value or _MODEL.value or _ENSEMBLE.value):
        raise ValueError("No model; expected --run=FOLDER or --model=FILE; received neither")
    if _MODEL.value and _ENSEMBLE.value:
        raise ValueError("Two models; expected --model or --ensemble; received both")
    if not RUN.value and not model_flags.DATA.value:
        raise ValueError("No data set; expected --data=NAME with --model; received none")


def load_model():
    """The model that --model, --ensemble or --run names."""
    import he_keras as he
    from he_keras.model_files import load_classifier

    if _ENSEMBLE.value:
        return he.SnapshotEnsemble.from_files(_ENSEMBLE.value)
    return load_classifier(_MODEL.value or pathlib.Path(RUN.value) / "model.keras")


def test_examples(config):
    """The test split, or its first examples."""
    from he_keras import experiment

    dataset = experiment.load_split(config, "test")
    return dataset.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else dataset


def output_dir() -> pathlib.Path:
    """--output_dir, or evaluation/ in the run folder or here."""
    if OUTPUT_DIR.value:
        return pathlib.Path(OUTPUT_DIR.value)
    return pathlib.Path(RUN.value or ".") / "evaluation"


def logit_scale():
    """--logit_scale, as a number if it is one; the attacks refuse unknown names."""
    try:
        return float(LOGIT_SCALE.value)
    except ValueError:
        return LOGIT_SCALE.value
