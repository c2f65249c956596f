"""The command `he-keras VERB --flags`, which every file of tools/ runs as well.

This file is not part of the package he_keras because it must run before TensorFlow is loaded: to
choose what TensorFlow's libraries print, and to end in one word on Ctrl-C.
"""

import difflib
import os
import re
import sys

#: What each program does; its module is he_keras/programs/<verb>.py.
PROGRAMS = {
    "train": "train a configuration into a run folder, or resume it",
    "evaluate": "attack a trained model and write a report",
    "merge": "make one report of the shards of an evaluation",
    "verify": "score the recorded adversarial images of an evaluation again",
    "gate": "test a model against limits and a baseline, for CI",
    "compare": "put the reports of several evaluations on one page",
    "transfer": "attack each of several models with images crafted for the others",
    "analyze": "measure and draw a property of trained models",
    "search": "search for scale, margin and other numbers of a configuration",
    "reproduce": "fill the tables and figures of the papers",
    "export": "write a model for serving",
    "import": "make a Keras model of a public robust checkpoint",
    "zoo": "list public robust checkpoints, or download one",
    "serve": "answer requests over HTTP with exported models",
    "quickstart": "train, attack and export two small models on digits",
    "benchmark": "measure the speed of this machine",
}
#: Flags of `evaluate` that have become programs.
_FORMER_FLAG = re.compile(r"--?(merge|verify|compare|transfer)(?:=(?:true|True|t|1))?")


def main(program: str | None = None) -> None:
    """Runs a program on the command line's flags; by default the one that it names first."""
    if program is None:
        program = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        if program in ("--help", "-h", "help"):
            print(_usage())
            return
        if program not in PROGRAMS:
            sys.exit(_error(_unknown(program)))
        sys.argv = [f"he-keras {program}", *sys.argv[2:]]
    program, sys.argv = present_form(program, sys.argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from he_keras.programs import cli
    except KeyboardInterrupt:
        print("Interrupted")
        sys.exit(130)
    except ModuleNotFoundError as error:
        if getattr(sys.modules.get("he_keras"), "__file__", "") is not None:
            raise
        folder = next(iter(sys.modules["he_keras"].__path__))
        sys.exit(_error(f"{error}: the folder {folder} hides the package; run in another folder"))
    cli.run_program(program)


def present_form(program: str, argv: list[str]) -> tuple[str, list[str]]:
    """Returns the program and the arguments to run; `evaluate --compare` is now `compare`."""
    found = list(filter(None, map(_FORMER_FLAG.fullmatch, argv[1:])))
    if program != "evaluate" or len(found) != 1:
        return program, argv
    flag, verb = found[0][0], found[0][1]
    print(f"note: evaluate --{verb} is now: he-keras {verb}", file=sys.stderr)
    return verb, [f"he-keras {verb}", *(each for each in argv[1:] if each != flag)]


def _unknown(program: str) -> str:
    """Says which programs there are, and which one was probably meant."""
    known = "|".join(PROGRAMS)
    nearest = difflib.get_close_matches(program, PROGRAMS, n=1)
    if os.path.exists(program):
        nearest = [f"evaluate --model={program}"]
    meant = f"; did you mean he-keras {nearest[0]}?" if nearest else ""
    return f"Unknown program; expected he-keras {known}; received {program}{meant}"


def _usage() -> str:
    width = max(map(len, PROGRAMS))
    lines = [f"  {program:<{width}}  {text}" for program, text in PROGRAMS.items()]
    heading = "usage: he-keras PROGRAM --flags (he-keras PROGRAM --help lists them)"
    return "\n".join([heading, *lines])


def _error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
