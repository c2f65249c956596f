"""Makes a Keras model of a public robust checkpoint, without PyTorch.

he-keras import FILE --recipe=at_he/wrn-34-20 --output=model.keras
he-keras import --recipe=at_he/wrn-34-20 --output=model.keras
he-keras import FILE --recipe=deepmind/wrn --options=activation=relu --output=model.keras

--recipe is a layout or a published file; `he-keras zoo` lists them. Without FILE, the downloaded
file is taken. Where the data set is prepared, the accuracy on the first 200 test images must be
that of the published model. The manual is docs/how-to/checkpoints.md.
"""

import pathlib

from absl import flags

from he_keras.programs import cli

POSITIONAL = 1
_RECIPE = flags.DEFINE_string("recipe", None, "A layout, or a published file; see he-keras zoo.")
_OUTPUT = flags.DEFINE_string("output", None, "The .keras file to write.")
_SCALE = flags.DEFINE_float("scale", None, "Scale of an HE head; default: the file's, else 10.")
_MARGIN = flags.DEFINE_float("margin", None, "Margin of an HE head; default: the file's, else 0.2.")
_OPTIONS = flags.DEFINE_list("options", [], "Options of the network: activation=relu,border=2.")
_STATISTICS = flags.DEFINE_list(
    "statistics", None, "Mean of each channel, then deviation of each channel; or none."
)
_INPUT_SHAPE = flags.DEFINE_list("input_shape", None, "Height, width and channels of the images.")
_CHECK = flags.DEFINE_bool("check", True, "Compare the clean accuracy with the published one.")
_DATA = flags.DEFINE_string("data", None, "Data set of the check; default: the published file's.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_FOLDER = flags.DEFINE_string("folder", "checkpoints", "Where downloaded files lie.")
_SHOW_IGNORED = flags.DEFINE_bool("show_ignored", False, "Print the name of every ignored tensor.")


def main(argv) -> None:
    """Reads the file, checks the model, and writes it."""
    with cli.one_line_errors():
        _import(argv[1] if len(argv) > 1 else None)


def check_flags(_arguments: list[str]) -> None:
    """Raises a ValueError where a flag is missing."""
    if not _RECIPE.value or not _OUTPUT.value or not _OUTPUT.value.endswith(".keras"):
        raise ValueError(
            "Missing flag; expected --recipe=NAME and --output=FILE.keras; received "
            f"--recipe={_RECIPE.value} and --output={_OUTPUT.value}"
        )


def _import(file: str | None) -> None:
    from he_keras.files import replacing
    from he_keras.zoo import loading
    from he_keras.zoo.contents import read_contents

    recipe, entry = loading.chosen(_RECIPE.value, _changes())
    path = pathlib.Path(file) if file else _downloaded(entry)
    contents = read_contents(recipe, path)
    model = loading.model_of(recipe, entry, contents, path, _SCALE.value, _MARGIN.value)
    for line in entry.description() if entry else ():
        print(line)
    print(_head_of(model))
    print(_left_out(contents))
    if _CHECK.value:
        _check(model, entry)
    with replacing(pathlib.Path(_OUTPUT.value)) as temporary:
        model.save(temporary)
    print(f"Model: {_OUTPUT.value}")


def _downloaded(entry) -> pathlib.Path:
    from he_keras.zoo.downloads import local_path

    if entry is None:
        raise ValueError(
            "No file; expected he-keras import FILE ..., or the name of a published file after "
            f"--recipe=; received --recipe={_RECIPE.value} alone"
        )
    path = local_path(entry, _FOLDER.value)
    if not path.exists():
        raise ValueError(
            f"The file is not here; expected {path}; received no such file: run he-keras zoo "
            f"--download={entry.name}, or fetch {entry.page} and put it there"
        )
    return path


def _changes() -> dict:
    """The fields of the recipe that the flags replace."""
    changes: dict = {}
    if _OPTIONS.value:
        changes["options"] = dict(map(_option, _OPTIONS.value))
    if _STATISTICS.value is not None:
        changes["statistics"] = _statistics(_STATISTICS.value)
    if _INPUT_SHAPE.value is not None:
        changes["input_shape"] = tuple(_numbers("input_shape", _INPUT_SHAPE.value, int))
    return changes


def _option(text: str) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"Invalid --options; expected NAME=VALUE,...; received {text}")
    return name, int(value) if value.isdecimal() else value


def _statistics(texts: list[str]):
    if texts == ["none"]:
        return False
    numbers = _numbers("statistics", texts, float)
    half = len(numbers) // 2
    if len(numbers) % 2:
        raise ValueError(
            "Invalid --statistics; expected as many deviations as means; received "
            f"{','.join(texts)}"
        )
    return tuple(numbers[:half]), tuple(numbers[half:])


def _numbers(flag: str, texts: list[str], kind: type) -> list:
    try:
        return [kind(text) for text in texts]
    except ValueError:
        raise ValueError(
            f"Invalid --{flag}; expected numbers separated by commas; received {','.join(texts)}"
        ) from None


def _head_of(model) -> str:
    head = getattr(model, "head", None)
    if head is None:
        return f"Network: {model.name}, a linear head"
    return f"Network: {model.name}, an HE head with scale {head.scale:g}, margin {head.margin:g}"


def _left_out(contents) -> str:
    """What of the file is not in the model."""
    groups = [f"{len(names)} of {pattern}" for pattern, names in contents.ignored.items()]
    lines = [f"Ignored tensors: {', '.join(groups) or 'none'}"]
    if _SHOW_IGNORED.value:
        lines += [f"  {name}" for names in contents.ignored.values() for name in names]
    plain = (int, float, str)
    beside = [
        f"{key} = {value}" if isinstance(value, plain) else str(key)
        for key, value in contents.beside.items()
    ]
    return "\n".join([*lines, *([f"Beside the tensors: {', '.join(beside)}"] if beside else [])])


def _check(model, entry) -> None:
    """Raises a ValueError if the model is not as accurate as the published one."""
    import he_keras as he

    data = _DATA.value or (entry.data if entry else None)
    if data is None:
        print("Not checked: a layout has no data set; --data=NAME names one.")
        return
    try:
        test = he.data.load(data, "test", _DATA_DIR.value)
    except he.data.DatasetNotFoundError:
        if _DATA.value:
            raise
        print(f"Not checked: {data} is not prepared on this machine.")
        return
    published = entry.clean if entry and data == entry.data else None
    check = he.zoo.check_clean(model, test, published)
    print(check.summary())
    if not check.looks_right:
        raise ValueError(
            f"The model does not look like the published one; expected about {published} % clean "
            f"accuracy; received {check.num_correct / check.num_examples:.1%}: nothing is written; "
            "--nocheck imports it all the same"
        )
