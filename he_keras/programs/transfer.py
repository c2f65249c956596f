"""Attacks each of several models with images that were crafted for the others.

he-keras transfer PATH_A PATH_B --data=cifar10 --attacks=pgd-20 --output_dir=FOLDER

A path is a .keras file, a run folder or a SavedModel. The matrices are written into FOLDER, and
into its report if it holds one of the same threat model.
"""

import pathlib

from absl import flags

from he_keras.files import check_model_exists
from he_keras.programs import cli, evaluation_flags, model_flags, registered

flags.adopt_module_key_flags(evaluation_flags)
# How many arguments without a flag `cli` allows.
POSITIONAL = 64


def main(arguments) -> None:
    """Attacks, prints the matrices and writes them."""
    with cli.one_line_errors():
        print(_transfer(arguments[1:]))


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError unless there are models, their data, and the attacks that are named."""
    if len(arguments) < 3:
        raise ValueError(
            "Too few models; expected he-keras transfer PATH PATH ...; received "
            f"{' '.join(arguments[1:]) or 'none'}"
        )
    if not model_flags.DATA.value:
        raise ValueError("No data set; expected --data=NAME; received none")
    model_flags.check_distinct(arguments[1:])
    for path in arguments[1:]:
        check_model_exists(path)
    registered.check_attacks(evaluation_flags.ATTACKS.value)


def _transfer(paths: list[str]) -> str:
    from he_keras.evaluation import transfer_matrix, write_transfer
    from he_keras.evaluation.report import add_to_report, check_belongs
    from he_keras.evaluation.transfer_matrix import DEFAULT_ATTACKS
    from he_keras.files import make_writable
    from he_keras.model_files import load_classifier

    config = evaluation_flags.configuration()
    target = pathlib.Path(evaluation_flags.OUTPUT_DIR.value or ".")
    folder = make_writable(target, "the transfer matrices")
    models = dict(zip(model_flags.short_names(paths), map(load_classifier, paths), strict=True))
    is_run = bool(evaluation_flags.RUN.value)
    threat, remark = model_flags.threat_of(config, models.values(), is_run)
    has_report = (folder / "report.json").exists()
    if has_report:
        check_belongs(folder, {"threat": threat.get_config()})
    options = {"logit_scale": evaluation_flags.logit_scale()}
    if evaluation_flags.STEP_SIZE.value:
        options["step_size"] = evaluation_flags.STEP_SIZE.value
    dataset = evaluation_flags.test_examples(config)
    for name in models:
        models[name], done = model_flags.as_classifier(models[name], dataset, name)
        remark += f"\n{done}" if done else ""
    cli.end_at_once_on_interrupt("Interrupted: nothing was written.")
    matrices = transfer_matrix(
        models,
        dataset,
        threat,
        evaluation_flags.ATTACKS.value or DEFAULT_ATTACKS,
        batch_size=evaluation_flags.BATCH_SIZE.value,
        show_progress=True,
        **options,
    )
    write_transfer(folder, matrices)
    if has_report:
        add_to_report(folder, transfer=matrices[0].to_json())
    tables = "\n\n".join(matrix.table() for matrix in matrices)
    return f"{remark}\n{tables}\nWritten to {folder}".strip()
