"""The report of an evaluation that was done in shards.

he-keras evaluate --run=runs/he --attacks=autoattack --shard=0/2
he-keras evaluate --run=runs/he --attacks=autoattack --shard=1/2
he-keras merge    --run=runs/he --attacks=autoattack

It takes the flags of the evaluation and attacks nothing, unless it is given --checks and no shard
has run them.
"""

from absl import flags

from he_keras.programs import cli, evaluate

flags.adopt_module_key_flags(evaluate)


def check_flags(arguments: list[str]) -> None:
    """Raises a ValueError for what `evaluate` refuses, and for its flags that change nothing."""
    cli.refuse("merge", "dry_run", "shard")
    evaluate.check_flags(arguments)


def main(_argv) -> None:
    """Makes the report of all shards."""
    with cli.one_line_errors():
        evaluate.run(merge=True)
