"""The model card as a page of Markdown; every figure comes from the card's plain data."""

import json
import pathlib

_LISTED_CLASSES = 20
_UNKNOWN = "not recorded"


def card_page(card: dict) -> str:
    """Returns the page of a card that `model_card` made."""
    sections = [
        f"# {_plain(card['name'])}",
        f"Written {card['created']} by he_keras {card['environment']['he_keras']}.",
        _model(card),
        _data(card),
        _threat(card),
        _evaluation(card["evaluation"]),
        _probabilities(card["probabilities"]),
        _conversions(card["conversions"]),
        f"## Intended use\n\n{card['intended_use']}",
        "## Limits\n\n" + "\n".join(f"* {limit}" for limit in card["limits"]),
        _interface(card),
        _block("Settings", card["settings"]),
        _block("Versions", card["environment"]),
    ]
    return "\n\n".join(sections) + "\n"


def _model(card: dict) -> str:
    model, head = card["model"], card["model"]["head"] or {}
    names = card["class_names"]
    shown = ", ".join(map(_plain, names[:_LISTED_CLASSES]))
    more = f" and {len(names) - _LISTED_CLASSES} more" if len(names) > _LISTED_CLASSES else ""
    details = ", ".join(f"{key} {value}" for key, value in head.items() if key != "class")
    rows = {
        "model": model["class"],
        "images": _shape(model["image_shape"]),
        "classes": f"{model['num_classes']}: {shown}{more}",
        "parameters": f"{model['num_parameters']:,}",
        "head": f"{head.get('class', _UNKNOWN)}{f' ({details})' if details else ''}",
        "training objective": model["objective"] or _UNKNOWN,
        "computes in": f"{', '.join(model['compute_dtypes'])}; answers in {model['output_dtype']}",
        "sha256 of the weights": f"`{model['weights_sha256']}`",
        "source": _plain(card["source"] or _UNKNOWN),
    }
    return "## Model\n\n" + _table(("", ""), rows.items())


def _data(card: dict) -> str:
    data = card["data"]
    if not data:
        return f"## Training data\n\nThe training data is {_UNKNOWN}."
    rows = [(key, _plain(value)) for key, value in data.items() if value not in ("", None)]
    return "## Training data\n\n" + _table(("", ""), rows)


def _threat(card: dict) -> str:
    threat = card["threat"]
    if not threat:
        return f"## Threat model\n\nWhat the model was trained against is {_UNKNOWN}."
    return f"## Threat model\n\nTrained against {_ball(threat)}."


def _ball(threat: dict) -> str:
    epsilon = threat["epsilon"]
    radius = epsilon if isinstance(epsilon, str) else f"{epsilon:.6g}"
    return f"perturbations of {threat['norm']} norm up to {radius}, pixels in [0, 1]"


def _evaluation(entry: dict) -> str:
    title = "## Evaluation"
    if "clean_accuracy" not in entry:
        return f"{title}\n\n{entry['note']}"
    rows = [("(clean)", _share(entry["clean_accuracy"], entry["clean_interval"]))]
    for attack in entry["attacks"]:
        scale = attack["logit_scale"]
        name = attack["name"] if scale == "model" else f"{attack['name']} (logit scale {scale})"
        rows.append((_plain(name), _share(attack["robust_accuracy"])))
    rows.append(("(worst case)", _share(entry["worst_case"], entry["worst_case_interval"])))
    about = f"{entry['num_examples']} test images, {_ball(entry['threat'])}. {entry['note']}"
    if entry["mode"] == "survivors":
        about += " Each attack ran on what all before it left."
    if entry["protocol"]:
        about += f" Protocol: {_plain(entry['protocol'])}."
    return f"{title}\n\n{about}\n\n{_table(('attack', 'accuracy'), rows)}\n\n{_checks(entry)}"


def _checks(entry: dict) -> str:
    checks = entry["checks"]
    if not checks:
        return "Sanity checks: none in the report."
    fired = [check for check in checks if check["verdict"] in ("warn", "fail")]
    counts = f"Sanity checks: {len(checks)}, of which {len(fired)} warn or fail."
    if not fired:
        return counts
    rows = [
        (check["name"], check["verdict"], _plain(check["figure"]), _plain(check["message"]))
        for check in fired
    ]
    return f"{counts}\n\n{_table(('check', 'verdict', 'figure', 'meaning'), rows)}"


def _probabilities(entry: dict) -> str:
    title, found = "## Probabilities", entry["calibration"]
    if found is None:
        return f"{title}\n\nThe softmax of the scaled logits, not calibrated."
    rows = [
        ("expected calibration error", f"{found['ece_before']:.4f}", f"{found['ece_after']:.4f}"),
        ("negative log-likelihood", f"{found['nll_before']:.4f}", f"{found['nll_after']:.4f}"),
    ]
    return (
        f"{title}\n\nThe softmax of the scaled logits divided by the temperature "
        f"{entry['temperature']:.6g}, fitted on {found['num_examples']} images ({found['data']}, "
        f"split {found['split']}); these figures are of the same images. The logits are as "
        f"trained.\n\n{_table(('', 'before', 'after'), rows)}"
    )


def _conversions(result: dict | None) -> str:
    if result is None:
        return "## Conversions\n\nNone."
    return (
        f"## Conversions\n\nScored on {result['num_examples']} images of {result['data']} "
        f"({result['split']}), {_ball(result['threat'])}. The attack ({result['attack']['name']}) "
        "crafted its images for the original; on a conversion they show at most how robust it is. "
        f"Flagged: lost more than {result['max_loss']:.2%}.\n\n{conversion_table(result)}"
    )


def conversion_table(result: dict) -> str:
    """Returns the rows of `conversions.json` as a table."""
    header = ("format", "bytes", "clean", "transferred", "same class", "logits differ by", "flag")
    rows = [
        (
            row["name"],
            "" if row["num_bytes"] is None else f"{row['num_bytes']:,}",
            _share(row["clean_accuracy"]),
            _share(row["transferred_accuracy"]),
            _share(row["agreement"]),
            f"{row['largest_logit_difference']:.2g}",
            "LOSS" if row["is_flagged"] else "",
        )
        for row in result["rows"]
    ]
    return _table(header, rows)


def conversion_summary(version: pathlib.Path) -> str:
    """Returns the table of an exported version's conversions, with a line for each flagged one."""
    result = json.loads((version / "assets.extra" / "conversions.json").read_text())
    flagged = [row["name"] for row in result["rows"] if row["is_flagged"]]
    lines = [
        f"Conversions, scored on {result['num_examples']} test images, adversarial ones crafted "
        f"for the original by {result['attack']['name']}:",
        conversion_table(result),
        *(f"WARNING: {name} lost more than {result['max_loss']:.2%}" for name in flagged),
        f"Files: {version / 'assets.extra' / 'conversions'}",
    ]
    return "\n".join(lines)


def _interface(card: dict) -> str:
    rows = []
    for name, signature in card["signatures"].items():
        given = signature["input"]
        what = f"{given['name']}: {given['dtype']} {_shape(given['shape'])}"
        rows.append((f"`{name}`", what, ", ".join(signature["outputs"])))
    steps = "\n".join(f"* {name}: {text}" for name, text in card["preprocessing"].items())
    return f"## Signatures\n\n{_table(('signature', 'input', 'outputs'), rows)}\n\n{steps}"


def _block(title: str, content: dict | None) -> str:
    if content is None:
        return f"## {title}\n\n{_UNKNOWN.capitalize()}."
    return f"## {title}\n\n```json\n{json.dumps(content, indent=2)}\n```"


def _table(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _shape(sides) -> str:
    return " x ".join("any" if side is None else str(side) for side in sides) or "one each"


def _share(share: float, interval=None) -> str:
    return f"{share:.2%}" + (f" ({interval[0]:.2%} to {interval[1]:.2%})" if interval else "")


def _plain(value) -> str:
    """Text that cannot end a cell, a line or a table."""
    return " ".join(str(value).replace("|", "\\|").split())
