"""Lists the published robust models that can be imported, and downloads one if asked.

he-keras zoo
he-keras zoo --recipe=at_he
he-keras zoo --download=at_he/wrn-34-20

Nothing is downloaded without --download. An interrupted download goes on with the same command.
The manual is docs/how-to/checkpoints.md.
"""

from absl import flags

from he_keras.programs import cli

_RECIPE = flags.DEFINE_string("recipe", None, "List only the files of this layout.")
_DOWNLOAD = flags.DEFINE_string("download", None, "Name of the file to download.")
_FOLDER = flags.DEFINE_string("folder", "checkpoints", "Where downloaded files lie.")


def main(_argv) -> None:
    """Prints the list, or downloads one file."""
    with cli.one_line_errors():
        if _DOWNLOAD.value:
            _download(_DOWNLOAD.value)
        else:
            print(_listing(_RECIPE.value))


def _download(name: str) -> None:
    from he_keras.zoo import catalog, downloads

    entry = catalog.ENTRIES[name]
    path = downloads.download(name, _FOLDER.value)
    digest = downloads.digest_of(path)
    known = "as published" if entry.sha256 == digest else "none is published to compare it with"
    print(f"File: {path}\nSHA-256: {digest} ({known})")
    print(f"Next: he-keras import --recipe={name} --output=model.keras")


def _listing(recipe: str | None) -> str:
    from he_keras.zoo import catalog

    chosen = [catalog.RECIPES[recipe]] if recipe else list(catalog.RECIPES.values())
    lines = []
    for each in chosen:
        lines.append(f"{each.name}: {each.source}")
        for entry in catalog.ENTRIES.values():
            if catalog.find(entry.name)[0] is each:
                lines += [f"  {line}" for line in entry.description()]
    return "\n".join(lines)
