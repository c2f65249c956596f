"""Robust accuracy of a trained model, over the whole test set unless told otherwise.

he-keras evaluate --run=runs/cifar10_small
he-keras evaluate --model=PATH --data=cifar10 --attacks=pgd-20,autoattack --epsilon=8/255
he-keras evaluate --model=PATH --data=cifar10 --protocol=paper
he-keras evaluate --ensemble=RUN/snapshots --data=cifar10

PATH is a .keras file, a run folder or a SavedModel. --attacks=transfer:PATH attacks with images
that were crafted for another model, --attacks=cleverhans:pgd-20 with the cleverhans library. The
same command goes on where an interrupted one stopped. --shard=0/4 to --shard=3/4 spread it over
four machines. The first also runs the checks and the panel. `he-keras merge` with the same flags
then makes the report. --dry_run shows what all this will cost, and stops. `he-keras verify`
scores the recorded images again, `compare` puts reports side by side, and `transfer` attacks
several models with each other's images.
"""

import dataclasses
import pathlib
from typing import Any

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
_ENSEMBLE = flags.DEFINE_list(
    "ensemble", None, "Files, run folders or folders of snapshots: their mean prediction."
)
_PROTOCOL = flags.DEFINE_string(
    "protocol", None, "paper, or the name of one: the evaluation settings of a paper's table."
)
_MODE = flags.DEFINE_enum(
    "mode", None, ["survivors", "individual"], "Each attack on what is left, or on every example."
)
_CHECKS = flags.DEFINE_bool(
    "checks",
    None,
    "Run the checks of docs/reference/checks.md; default: yes, but not to merge shards.",
)
_PANEL = flags.DEFINE_bool(
    "panel", None, "Run the panel of a cosine head; default: where the checks run."
)
_CORRUPTIONS = flags.DEFINE_string(
    "corruptions", None, "generated, tfds, or the folder of published .npy files: adds them."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print what it will cost, after short runs here, and write nothing."
)
_SHARD = flags.DEFINE_string("shard", None, "i/n: attack only the i-th of n parts, from 0 on.")
flags.adopt_module_key_flags(evaluation_flags)


def main(_argv) -> None:
    """Loads everything, attacks, prints the table and writes the report."""
    with cli.one_line_errors():
        run(merge=False)


def run(merge: bool) -> None:
    """Evaluates, or with `merge` makes the report of what the shards have recorded."""
    import he_keras as he
    from he_keras.evaluation.corruption_benchmark import cost_of_corruptions

    config = evaluation_flags.configuration()
    for name in [] if _PROTOCOL.value else config.evaluation.attacks:
        he.attacks.check_name(name)
    folder = output_dir()
    model = load_model()
    threat, attacks, mode, protocol, remark = _plan(config, model)
    dataset = evaluation_flags.test_examples(config)
    model, done = model_flags.as_classifier(model, dataset)
    substitutes = model_flags.prepare_substitutes(attacks, dataset)
    cli.end_at_once_on_interrupt("Interrupted: the same command goes on from here.")
    for each in filter(None, (done, *substitutes)):
        print(each)
    asked: dict[str, Any] = {
        "mode": _MODE.value or mode,
        "checks": _CHECKS.value,
        "panel": _PANEL.value,
    }
    asked |= {"examples": dataset, "threat": threat, "attacks": attacks}
    asked |= {"shard": _shard(), "batch_size": BATCH_SIZE.value}
    if _CORRUPTIONS.value:
        _check_corruptions(model, dataset, threat.bounds)
    if _DRY_RUN.value:
        cost = he.evaluation.cost_of_evaluation(model, **asked)
        if _CORRUPTIONS.value:
            part = cost_of_corruptions(model, dataset, **_corruptions(threat.bounds))
            cost = dataclasses.replace(cost, parts=(*cost.parts, part))
        print(cost.text())
        return
    told: dict[str, Any] = {"protocol": protocol, "training": _training(), "show_progress": True}
    report = he.evaluate_robustness(model, output_dir=folder, merge=merge, **asked, **told)
    if remark:
        print(remark)
    if _SHARD.value:
        # There is no accuracy of a shard without examples.
        print(report.table() if report.num_examples else "This shard has no examples.")
        print(f"Shard {_SHARD.value} is done; he-keras merge makes the report once all shards are.")
        return
    print(report.table())
    if merge and not report.checks and _CHECKS.value is None:
        print("No shard has run the checks: he-keras merge --checks runs them.")
    if _CORRUPTIONS.value:
        print(_add_corruptions(model, dataset, threat.bounds, folder))
    print(f"Report: {folder / 'report.html'}")


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError unless the flags name one model that is there, and its data."""
    if not (RUN.value or _MODEL.value or _ENSEMBLE.value):
        raise ValueError("No model; expected --run=FOLDER or --model=FILE; received neither")
    if _MODEL.value and _ENSEMBLE.value:
        raise ValueError("Two models; expected --model or --ensemble; received both")
    if not RUN.value and not model_flags.DATA.value:
        raise ValueError("No data set; expected --data=NAME with --model; received none")
    for path in (RUN.value, _MODEL.value, *(_ENSEMBLE.value or [])):
        if path:
            check_model_exists(path)
    registered.check_attacks(ATTACKS.value)


def load_model():
    """The model that --model, --ensemble or --run names."""
    import he_keras as he
    from he_keras.model_files import load_classifier

    if _ENSEMBLE.value:
        return he.SnapshotEnsemble.from_files(_ENSEMBLE.value)
    return load_classifier(_MODEL.value or pathlib.Path(RUN.value) / "model.keras")


def _training() -> dict | None:
    """The configuration of the run whose model is evaluated; None for any other model."""
    from he_keras.files import read_json

    source = "" if _ENSEMBLE.value else _MODEL.value or RUN.value
    path = pathlib.Path(source)
    folder = path.parent if path.name == "model.keras" else path
    is_run = bool(source) and (folder / "config.json").is_file()
    return read_json(folder / "config.json") if is_run else None


def output_dir() -> pathlib.Path:
    """--output_dir, or evaluation/ in the run folder or here."""
    if OUTPUT_DIR.value:
        return pathlib.Path(OUTPUT_DIR.value)
    return pathlib.Path(RUN.value or ".") / "evaluation"


def _plan(config, model):
    """Threat model, attacks, mode, text for the headline, and what to say of the threat model."""
    import he_keras as he

    if _PROTOCOL.value:
        return _plan_of_protocol(config, model)
    threat, remark = model_flags.threat_of(config, [model], bool(RUN.value))
    options = {"logit_scale": evaluation_flags.logit_scale(), "batch_size": BATCH_SIZE.value}
    attacks = he.experiment.build_attacks(config, threat, **options)
    return threat, attacks, config.evaluation.mode, None, remark


def _plan_of_protocol(config, model):
    from he_keras.evaluation import protocols
    from he_keras.threat import trained_threat

    fixed = (ATTACKS, *model_flags.THREAT_FLAGS, STEP_SIZE)
    given = [flag.name for flag in fixed if flag.value]
    if LOGIT_SCALE.value != "model":
        given.append(LOGIT_SCALE.name)
    if given:
        raise ValueError(
            f"A protocol fixes its settings; expected --protocol={_PROTOCOL.value} without "
            f"{', '.join('--' + name for name in given)}; received both"
        )
    if _PROTOCOL.value == "paper":
        chosen = protocols.for_dataset(config.data.name, BATCH_SIZE.value)
    else:
        chosen = protocols.get(_PROTOCOL.value, BATCH_SIZE.value)
    print(f"Protocol {chosen.name}: {chosen.text}\n{chosen.note}")
    trained = trained_threat(model)
    is_other = trained not in (None, chosen.threat)
    remark = f"Trained at {trained.text()}; attacked at {chosen.threat.text()}." if is_other else ""
    return chosen.threat, chosen.attacks, chosen.mode, chosen.text, remark


def _check_corruptions(model, dataset, bounds) -> None:
    """Tries one corruption of one image, before attacks that may take hours."""
    from he_keras.evaluation import evaluate_corruptions

    few: dict[str, Any] = {"corruptions": ("brightness",), "severities": (1,), "num_examples": 1}
    evaluate_corruptions(model, dataset.take(1), **few, **_corruptions(bounds))


def _add_corruptions(model, dataset, bounds, folder) -> str:
    from he_keras.evaluation import evaluate_corruptions
    from he_keras.evaluation.report import add_to_report

    report = evaluate_corruptions(model, dataset, show_progress=True, **_corruptions(bounds))
    add_to_report(folder, corruptions=report.to_json())
    return report.table()


def _corruptions(bounds) -> dict[str, Any]:
    """Where the corrupted images come from."""
    folder = model_flags.DATA_DIR.value
    return {"source": _CORRUPTIONS.value, "data_dir": folder, "bounds": bounds}


def _shard() -> tuple[int, int] | None:
    if not _SHARD.value:
        return None
    index, _, count = _SHARD.value.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise ValueError(f"Invalid --shard; expected i/n such as 0/4; received {_SHARD.value}")
    return int(index), int(count)
