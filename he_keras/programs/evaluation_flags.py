"""The flags that every program with attacks has, and what they stand for."""

from absl import flags

from he_keras.programs import model_flags

RUN = flags.DEFINE_string("run", None, "Run folder: model, data, threat and attacks come from it.")
ATTACKS = flags.DEFINE_list("attacks", None, "Attack names, separated by commas.")
STEP_SIZE = flags.DEFINE_string("step_size", None, "Step of the gradient attacks.")
LOGIT_SCALE = flags.DEFINE_string("logit_scale", "model", "model, unit, or a number.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 0, "Only the first examples; 0 for all.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 250, "Examples per batch.")
OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the report goes; default: the run.")
flags.adopt_module_key_flags(model_flags)


def configuration(run=None):
    """The configuration of --run, else of a run folder, else the default one; flags override it."""
    from he_keras import experiment

    run = RUN.value or run
    config = experiment.read_config(run) if run else experiment.default_config()
    model_flags.override_data(config)
    with config.unlocked():
        config.evaluation.attacks = tuple(ATTACKS.value or config.evaluation.attacks)
        config.evaluation.step_size = STEP_SIZE.value or config.evaluation.step_size
    return config


def test_examples(config):
    """The test split, or its first examples."""
    from he_keras import experiment

    dataset = experiment.load_split(config, "test")
    return dataset.take(_NUM_EXAMPLES.value) if _NUM_EXAMPLES.value else dataset


def logit_scale():
    """--logit_scale, as a number if it is one; the attacks refuse unknown names."""
    try:
        return float(LOGIT_SCALE.value)
    except ValueError:
        return LOGIT_SCALE.value
