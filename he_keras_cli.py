"""The command `he-keras VERB --flags`, which every file of tools/ runs as well.

This file is not part of the package he_keras because it must run before TensorFlow is loaded. It
chooses what TensorFlow's libraries print, ends in one word on Ctrl-C, and answers mistakes in flags
at once. Loading TensorFlow takes seconds.
"""

import difflib
import importlib.util
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
    "doctor": "show versions, devices, data sets, speed and known problems",
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
        if program == "--version":
            print(f"he-keras {_version()}")
            return
        if program not in PROGRAMS:
            sys.exit(_error(_unknown(program)))
        sys.argv = [f"he-keras {program}", *sys.argv[2:]]
    program, sys.argv = present_form(program, sys.argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        load_package = _put_off()
        from he_keras.programs import cli

        arguments = cli.check_command(program)
        load_package()
    except KeyboardInterrupt:
        print("Interrupted")
        sys.exit(130)
    except Exception as error:
        if program != "doctor":
            raise
        sys.exit(_broken(error))
    cli.run_program(program, arguments)


def _version() -> str:
    _put_off()
    from he_keras.version import __version__

    return __version__


def _broken(error: Exception) -> int:
    """Says what can be said of an installation that cannot be imported."""
    from he_keras import requirements

    found = requirements.packages()
    print(f"Packages:\n{requirements.table(found)}")
    cause = f"he_keras cannot be imported: {type(error).__name__}: {error}"
    for problem in (*requirements.problems(found), " ".join(cause.split())):
        print(f"PROBLEM: {problem}")
    return 1


def _put_off():
    """Makes the package known without running its __init__, which loads TensorFlow.

    Until the function that is returned runs it, only parts that need no TensorFlow can be imported.
    """
    if "he_keras" in sys.modules:
        return lambda: None
    _check_not_hidden()
    package = _as_folder("he_keras")
    # They hold the names of the experiments and attacks.
    folders = [_as_folder(name) for name in ("he_keras.experiment", "he_keras.attacks")]

    def load() -> None:
        for each in folders:
            del sys.modules[each.__name__]
        package.__spec__.loader.exec_module(package)

    return load


def _as_folder(name: str):
    """Enters a package into `sys.modules` as it is before its __init__ runs."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _check_not_hidden() -> None:
    """Ends the program if Python takes something else for the package."""
    spec = importlib.util.find_spec("he_keras")
    if spec is None:
        sys.exit(_error("The package he_keras is not there; expected: pip install he_keras"))
    folders = list(spec.submodule_search_locations or [])
    if not any(os.path.isfile(os.path.join(each, "programs", "cli.py")) for each in folders):
        found = spec.origin or folders[0]
        sys.exit(_error(f"{found} hides the package he_keras; run in another folder, or rename it"))


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
