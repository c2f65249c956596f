"""Tests a model against limits and against an earlier evaluation, for CI.

he-keras gate --model=PATH --data=cifar10 --min_worst_case=0.45
he-keras gate --model=PATH --baseline=runs/last/evaluation --min_worst_case=0.45 --max_loss=0.01

The exit code is 0 if the gate is passed, 1 if not, and 2 for a mistake in the call.

--min_worst_case: the share of the images that no attack breaks must be at least this. The share
itself counts; its 95 % interval is shown beside it.
--max_loss: how much of this share may be lost against the baseline. The upper end of the 95 %
interval of the loss must be at most this: a test of non-inferiority on the same images. If the
interval contains the limit, the images are too few to decide, and the exit code is 1.

PATH is a .keras file, a run folder or a SavedModel. The attacks are those of the baseline, with
their settings, else `fast`. They cost no more than `fast` unless --attacks names them. Data and
threat model come from --run, from PATH or from the baseline. --output_dir (gate/ in the run folder
or here) holds the report, gate.junit.xml and gate.sarif. The same command goes on where an
interrupted one stopped.
"""

import dataclasses
import functools
import pathlib

from absl import flags

from he_keras.files import check_model_exists
from he_keras.programs import cli, evaluation_flags, model_flags, registered
from he_keras.programs.evaluation_flags import (
    ATTACKS,
    BATCH_SIZE,
    LOGIT_SCALE,
    OUTPUT_DIR,
    RUN,
    STEP_SIZE,
)

_MODEL = flags.DEFINE_string(
    "model", None, "A .keras file, run folder or SavedModel; with --run, in place of the run's."
)
_BASELINE = flags.DEFINE_string(
    "baseline", None, "Folder of an earlier evaluation of the same images, or its run folder."
)
_MIN_WORST_CASE = flags.DEFINE_float(
    "min_worst_case", None, "Least worst-case accuracy on these images, such as 0.45."
)
_MAX_LOSS = flags.DEFINE_float(
    "max_loss", None, "Largest loss against the baseline that the 95 % interval may reach."
)
_CHECKS = flags.DEFINE_bool(
    "checks", False, "Run the checks of the evaluation too; one that fails closes the gate."
)
flags.adopt_module_key_flags(evaluation_flags)


def main(_argv) -> None:
    """Runs the gate, prints the verdicts, and ends with 1 where it is not passed."""
    with cli.one_line_errors():
        result = _run()
    print(result.report.table())
    print(result.summary())
    folder = result.files[0].parent
    print(f"Report: {folder / 'report.html'}\nFor CI: {' '.join(map(str, result.files))}")
    if not result.passed:
        raise SystemExit(1)


def _run():
    from he_keras.evaluation.gate import read_baseline, run_gate
    from he_keras.evaluation.gate.verdicts import check_limits
    from he_keras.model_files import load_classifier

    check_limits(_MIN_WORST_CASE.value, _MAX_LOSS.value, bool(_BASELINE.value))
    path = _model_path()
    baseline = read_baseline(_BASELINE.value) if _BASELINE.value else None
    run = _run_folder(path, baseline)
    config = evaluation_flags.configuration(run)
    with config.unlocked():
        config.evaluation.attacks = tuple(ATTACKS.value or ("fast",))
    model = load_classifier(path)
    threat, remark = _threat(config, model, baseline, run is not None)
    dataset = evaluation_flags.test_examples(config)
    if baseline and len(dataset) > baseline.num_examples:
        dataset = dataset.take(baseline.num_examples)
        print(f"The first {baseline.num_examples} images, as the baseline.")
    model, done = model_flags.as_classifier(model, dataset)
    for each in filter(None, (done, remark)):
        print(each)
    attacks = _attacks(config, threat, baseline)
    if baseline:
        prepare = functools.partial(_prepare, dataset=dataset)
        baseline = dataclasses.replace(baseline, prepare=prepare)
    else:
        _prepare(attacks, dataset)
    cli.end_at_once_on_interrupt("Interrupted: the same command goes on from here.")
    return run_gate(
        model,
        dataset,
        threat,
        OUTPUT_DIR.value or pathlib.Path(RUN.value or ".") / "gate",
        _MIN_WORST_CASE.value,
        baseline,
        _MAX_LOSS.value,
        attacks,
        BATCH_SIZE.value,
        _CHECKS.value,
        show_progress=True,
        subject=str(path),
    )


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError unless the flags name a model and attacks that there are."""
    check_model_exists(_model_path())
    registered.check_attacks(ATTACKS.value)


def _prepare(attacks, dataset) -> None:
    """Makes ordinary classifiers of substitutes attackable, and says so."""
    for each in model_flags.prepare_substitutes(attacks, dataset):
        print(each)


def _model_path() -> pathlib.Path:
    if not (RUN.value or _MODEL.value):
        raise ValueError("No model; expected --model=FILE or --run=FOLDER; received neither")
    return pathlib.Path(_MODEL.value or pathlib.Path(RUN.value) / "model.keras")


def _run_folder(path: pathlib.Path, baseline) -> pathlib.Path | None:
    """The run that names the data, unless --data does: of the model, or of the baseline."""
    if RUN.value or model_flags.DATA.value:
        return pathlib.Path(RUN.value) if RUN.value else None
    folders = [path, path.parent, *([baseline.folder.parent] if baseline else [])]
    found = next((each for each in folders if (each / "config.json").is_file()), None)
    if found is None:
        raise ValueError(
            "No data set; expected --data=NAME, or a model or a baseline in a run folder; "
            f"received --model={path} alone"
        )
    return found


def _threat(config, model, baseline, is_run: bool):
    """The threat model of the flags, else of the baseline, else of the run or the model."""
    if baseline is None or any(flag.value for flag in model_flags.THREAT_FLAGS):
        return model_flags.threat_of(config, [model], is_run)
    known = baseline.threat
    return model_flags.chosen_threat(config, [model], is_run, known.norm, known.epsilon)


def _attacks(config, threat, baseline):
    """The attacks to run, or the names that allow those of the baseline."""
    from he_keras import experiment

    if baseline is None:
        options = {"logit_scale": evaluation_flags.logit_scale(), "batch_size": BATCH_SIZE.value}
        return experiment.build_attacks(config, threat, **options)
    if STEP_SIZE.value or LOGIT_SCALE.value != "model":
        raise ValueError(
            "The attacks run as they ran for the baseline; expected neither --step_size nor "
            f"--logit_scale; received {STEP_SIZE.value or LOGIT_SCALE.value} with --baseline"
        )
    return ATTACKS.value
