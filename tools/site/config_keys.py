"""The page of all keys of a configuration, with the defaults that the code has."""

from arguments import cell

from he_keras.experiment import default_config
from he_keras.experiment.keys import MEANINGS, flat


def configuration_page() -> str:
    """Every key, its default and what it means."""
    lines = [
        "# Configuration keys",
        "",
        "Generated from the code. A configuration file returns `default_config()` with some "
        "values changed. On the command line, `--config.KEY=VALUE` changes one.",
        "",
        "The further keys of `objective`, `network.options`, `schedule` and `epsilon_schedule` "
        "are arguments: [of objectives](objective_arguments.md), "
        "[of networks and schedules](options.md).",
        "",
    ]
    section, defaults = None, flat(default_config())
    for key, meaning in MEANINGS.items():
        name = key.partition(".")[0] if "." in key else "general"
        if name != section:
            section = name
            lines += ["", f"## {name}", "", "| key | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{key}` | `{cell(repr(defaults[key]))}` | {cell(meaning)} |")
    return "\n".join(lines)
