"""The model card as a page of Markdown, and what the console says about conversions."""

import functools
import importlib.resources
import json
import pathlib


def card_page(card: dict) -> str:
    """Returns the page of a card that `model_card` made."""
    return _templates().get_template("model_card.md.jinja").render(card=card)


def conversion_summary(version: pathlib.Path) -> str:
    """Returns the table of an exported version's conversions, with a line for each flagged one."""
    result = json.loads((version / "assets.extra" / "conversions.json").read_text())
    table = _templates().get_template("conversions.md.jinja").render(conversions=result)
    flagged = [row["name"] for row in result["rows"] if row["is_flagged"]]
    lines = [
        f"Conversions, scored on {result['num_examples']} test images, adversarial ones crafted "
        f"for the original by {result['attack']['name']}:",
        table.rstrip(),
        *(f"WARNING: {name} lost more than {result['max_loss']:.2%}" for name in flagged),
        f"Files: {version / 'assets.extra' / 'conversions'}",
    ]
    return "\n".join(lines)


@functools.cache
def _templates():
    """The templates; no value that enters one can end a cell, a line or a table."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        finalize=_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(ball=_ball, json=_json, shape=_shape, share=_share)
    return environment


def _template(name: str) -> str:
    folder = importlib.resources.files("he_keras.export").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _one_line(value):
    """A value on one line, without bars; `Markup`, which our own filters return, as it is."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    return " ".join(str(value).replace("|", "\\|").split())


def _json(values):
    from markupsafe import Markup

    return Markup(json.dumps(values, indent=2))


def _ball(threat: dict) -> str:
    epsilon = threat["epsilon"]
    radius = epsilon if isinstance(epsilon, str) else f"{epsilon:.6g}"
    low, high = threat.get("bounds") or (0, 1)
    return f"perturbations of {threat['norm']} norm up to {radius}, pixels in [{low:g}, {high:g}]"


def _shape(sides) -> str:
    return " x ".join("any" if side is None else str(side) for side in sides) or "one each"


def _share(share: float, interval=None) -> str:
    return f"{share:.2%}" + (f" ({interval[0]:.2%} to {interval[1]:.2%})" if interval else "")
