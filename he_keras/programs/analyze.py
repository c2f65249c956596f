"""Analyses of trained models: numbers (.json) and a picture (.png).

he-keras analyze                                   (lists the analyses)
he-keras analyze gradient-norms --run=runs/linear,runs/he
he-keras analyze attack-steps --run=runs/he_1_step,runs/he_3_steps --num_examples=2000
he-keras analyze class-weights --run=model.keras --data=cifar10
he-keras analyze gradient-norms --run=runs/he --option num_steps=20 --option seed=1

A run is a run folder, a .keras file or a SavedModel; the last two need --data.
docs/research/analysis.md explains each analysis.
"""

import json
import pathlib

from absl import flags

from he_keras.files import check_model_exists
from he_keras.programs import cli, model_flags, registered

_RUN = flags.DEFINE_list("run", None, "Run folders, .keras files or SavedModels to analyse.")
_SPLIT = flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Part of the data.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 1000, "Only the first examples; 0 for all.")
_OPTION = flags.DEFINE_multi_string("option", [], "An option of the analysis, as key=value.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", None, "Where numbers and picture go; default: analysis/ in the first run."
)
flags.adopt_module_key_flags(model_flags)
# How many arguments without a flag `cli` allows.
POSITIONAL = 1
_CONFIG = "config.json"
_BATCH_SIZE = 250


def main(arguments) -> None:
    """Lists the analyses, or runs the one that is named."""
    with cli.one_line_errors():
        print(_analyze(arguments[1]) if len(arguments) > 1 else _listing())


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError unless the analysis is known and there is something to analyse."""
    if len(arguments) == 1:
        return
    registered.check_part("analysis", "analysis", arguments[1])
    if not _RUN.value:
        raise ValueError("No model; expected --run=FOLDER or FILE, or several; received none")
    for path in _RUN.value:
        check_model_exists(path)


def _listing() -> str:
    from he_keras import analysis

    summaries = analysis.summaries()
    width = max(map(len, summaries))
    lines = [f"  {name:<{width}}  {text}" for name, text in summaries.items()]
    return "\n".join(["he-keras analyze NAME --run=FOLDER[,FOLDER], where NAME is one of", *lines])


def _analyze(name: str) -> str:
    from he_keras import analysis
    from he_keras.files import make_writable

    chosen = analysis.from_text(name, _OPTION.value)
    subjects = _subjects()
    folder = make_writable(_output_dir(), "the analysis")
    cli.end_at_once_on_interrupt("Interrupted: nothing was written.")
    content = chosen.run(subjects, folder)
    table = chosen.table(content["numbers"])
    written = [f"Numbers: {folder / name}.json", f"Picture: {folder / name}.png"]
    heading = f"Measured at {_threats(subjects)}"
    return "\n".join([*([heading, table] if table else []), *written])


def _threats(subjects) -> str:
    """The threat model of all subjects, or of each."""
    texts = {subject.name: subject.threat.text() for subject in subjects}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{text} ({name})" for name, text in texts.items())


def _subjects() -> list:
    """The models, each with the examples and the threat model to measure it with."""
    paths = [path.rstrip("/") for path in _RUN.value]
    model_flags.check_distinct(paths)
    examples: dict = {}
    return [
        _subject(name, pathlib.Path(path), examples)
        for name, path in zip(model_flags.short_names(paths), paths, strict=True)
    ]


def _subject(name: str, path: pathlib.Path, examples: dict):
    from he_keras import experiment
    from he_keras.analysis import Subject
    from he_keras.model_files import load_classifier

    model = load_classifier(path)
    has_config = (path / _CONFIG).is_file()
    config = experiment.read_config(path) if has_config else experiment.default_config()
    settings = experiment.to_plain(config) if has_config else {}
    if not has_config and not model_flags.DATA.value:
        raise ValueError(
            f"No data set; expected --data=NAME for a model without {_CONFIG}; received {path}"
        )
    model_flags.override_data(config)
    threat, remark = model_flags.threat_of(config, [model], has_config)
    if remark:
        print(f"{name}: {remark}")
    images, labels = _examples(config, threat, examples)
    model, done = model_flags.as_classifier(model, (images, labels), name)
    if done:
        print(done)
    folder = path if path.is_dir() else None
    return Subject(name, model, images, labels, threat, settings, folder)


def _examples(config, threat, examples: dict):
    """Images and labels; equal settings are read once."""
    from he_keras import experiment
    from he_keras.evaluation.run.examples import Examples

    shape, classes = tuple(config.network.input_shape), config.head.num_classes
    key = json.dumps([config.data.to_dict(), shape, classes, threat.bounds])
    if key not in examples:
        dataset = experiment.load_split(config, _SPLIT.value)
        if dataset is None:
            raise ValueError(
                "No validation examples; expected a run that held some out; received "
                f"--split={_SPLIT.value}"
            )
        if _NUM_EXAMPLES.value:
            dataset = dataset.take(_NUM_EXAMPLES.value)
        examples[key] = Examples(threat, dataset, _BATCH_SIZE).first(len(dataset))
    return examples[key]


def _output_dir() -> pathlib.Path:
    if _OUTPUT_DIR.value:
        return pathlib.Path(_OUTPUT_DIR.value)
    first = pathlib.Path(_RUN.value[0])
    return (first if first.is_dir() else first.parent) / "analysis"
