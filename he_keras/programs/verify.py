"""Scores the recorded adversarial images of an evaluation again.

he-keras verify --run=runs/cifar10_small
he-keras verify --model=PATH --data=cifar10 --output_dir=FOLDER

It takes the flags of the evaluation; those of attacks change nothing here. FOLDER is where the
evaluation was written. The exit code is 1 if what the report claims does not hold.
"""

from absl import flags

from he_keras.programs import cli, evaluate, evaluation_flags, model_flags

flags.adopt_module_key_flags(evaluate)


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError for what `evaluate` refuses, and for its flags that change nothing."""
    cli.refuse("verify", "dry_run", "shard", "corruptions")
    evaluate.check_flags(arguments)


def main(_argv) -> None:
    """Verifies, prints what was found, and ends with 1 where the records do not hold."""
    from he_keras.evaluation import verify

    with cli.one_line_errors():
        dataset = evaluation_flags.test_examples(evaluation_flags.configuration())
        model, _ = model_flags.as_classifier(evaluate.load_model(), dataset)
        found = verify(
            model,
            dataset,
            evaluate.output_dir(),
            evaluation_flags.BATCH_SIZE.value,
        )
    print(found.summary())
    if not found.holds:
        raise SystemExit(1)
