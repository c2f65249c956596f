"""Writes a model as RobustBench's classes load it, with what a submission asks for.

RobustBench evaluates the cosines of an HE model, without its scale. So the cosines' figures are
those of its entry. The text of the issue also gives the figures on scaled logits.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import keras

from he_keras.evaluation.run.facts import weights_digest
from he_keras.export.model_card import Provenance
from he_keras.files import write_json
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import ThreatModel, fraction_of_255
from he_keras.zoo.layouts import Layout, layout_of
from he_keras.zoo.tensor_files import write_safetensors, write_torch

_COSINES = "unit"
_CLASSES = {
    "robustbench/boosting": "BoostingWideResNet",
    "robustbench/wrn": "WideResNet",
    "robustbench/preact": "PreActResNet",
    "robustbench/resnet": "ResNet",
    "deepmind/wrn": "DMWideResNet",
    "deepmind/preact": "DMPreActResNet",
}
_ARCHITECTURES = {"wide_resnet": "WideResNet", "preact_resnet": "PreActResNet", "resnet": "ResNet"}
_NORMS = {"linf": "Linf", "l2": "L2"}
_TO_FILL_IN = "(to be filled in)"


def export_robustbench(
    model: keras.Model,
    folder: str | pathlib.Path,
    name: str,
    reports: Sequence[dict[str, Any]] = (),
    data: str = "cifar10",
) -> Layout:
    """Writes NAME.pt, NAME.safetensors, NAME.json and NAME_issue.md, and returns the layout.

    Args:
        model: the model, of a network that RobustBench has a class for.
        folder: the folder of the files.
        name: the name of the submission, such as "Pang2020Boosting".
        reports: the `report.json` of its evaluations with AutoAttack, as plain data: with
            `logit_scale="unit"` for the cosines of an HE head, otherwise for the scaled logits.
        data: the data set.

    Raises:
        ValueError: No class fits the model, or a report is of another model.

    Example:
        >>> import pathlib, tempfile
        >>> import he_keras as he
        >>> from he_keras.export import export_robustbench
        >>> network = he.networks.get("wide-resnet-10-1")
        >>> model = he.HEAdversarialModel(network, he.CosineHead(10))
        >>> folder = tempfile.mkdtemp()
        >>> export_robustbench(model, folder, "Mine2026").network
        'wide_resnet_10_1'
        >>> sorted(path.name for path in pathlib.Path(folder).iterdir())
        ['Mine2026.json', 'Mine2026.pt', 'Mine2026.safetensors', 'Mine2026_issue.md']
    """
    if not name.isidentifier():
        raise ValueError(
            f"Invalid name of a submission; expected letters, digits and _; received {name!r}"
        )
    for report in reports:
        _check_report(report, model)
    layout = layout_of(model)
    folder = pathlib.Path(folder)
    write_torch(folder / f"{name}.pt", layout.tensors)
    write_safetensors(folder / f"{name}.safetensors", layout.tensors)
    is_cosine = layout.recipe.name == "robustbench/boosting"
    figures = _figures(reports, is_cosine)
    write_json(folder / f"{name}.json", _entry(layout, figures, data))
    text = _issue(name, layout, figures, model)
    (folder / f"{name}_issue.md").write_text(text, encoding="utf-8")
    return layout


def _check_report(report: dict[str, Any], model: keras.Model) -> None:
    Provenance(report=report)
    evaluated = report.get("settings", {}).get("model", {}).get("weights")
    if evaluated not in (None, weights_digest(model)):
        raise ValueError(
            "The report is of another model; expected the weights that are exported; received a "
            f"report with the digest {evaluated[:12]}"
        )


def _figures(reports: Sequence[dict[str, Any]], is_cosine: bool) -> dict[str, dict[str, Any]]:
    """Returns the standard AutoAttack on "cosines" and on "logits", as far as it was run."""
    found = {}
    for report in reports:
        for number, row in enumerate(report["attacks"]):
            settings = row["settings"]
            # In mode "survivors" a row after the first is not asked about every image.
            is_whole = report["mode"] == "individual" or number == 0
            is_standard = settings.get("version") == settings.get("order", "standard") == "standard"
            if is_standard and row["name"] == "autoattack" and is_whole:
                scale = settings["logit_scale"]
                kind = "cosines" if is_cosine and scale == _COSINES else "logits"
                found[kind] = {
                    "clean": report["clean_accuracy"],
                    "robust": row["robust_accuracy"],
                    "num_examples": report["num_examples"],
                    "threat": ThreatModel(**report["threat"]),
                }
    return found


def _published(figures: dict[str, dict[str, Any]], layout: Layout) -> dict[str, Any] | None:
    """The figures that RobustBench would measure: of the cosines, where the head has them."""
    is_cosine = layout.recipe.name == "robustbench/boosting"
    return figures.get("cosines" if is_cosine else "logits")


def _entry(layout: Layout, figures: dict[str, dict[str, Any]], data: str) -> dict[str, Any]:
    """Returns the entry of RobustBench's model_info. What nobody knows here is empty."""
    measured = _published(figures, layout)
    return {
        "link": "",
        "name": "",
        "authors": "",
        "additional_data": None,
        "number_forward_passes": 1,
        "dataset": data,
        "venue": "",
        "architecture": _architecture(layout),
        "eps": _radius(measured["threat"]) if measured else "",
        "clean_acc": _percent(measured["clean"]) if measured else "",
        "reported": _percent(measured["robust"]) if measured else "",
        "autoattack_acc": _percent(measured["robust"]) if measured else "",
    }


def _issue(
    name: str, layout: Layout, figures: dict[str, dict[str, Any]], model: keras.Model
) -> str:
    """Returns the text of the issue that proposes a model."""
    measured = _published(figures, layout)
    claims = [
        f"* {kind}: clean {_percent(each['clean'])} %, AutoAttack (standard) "
        f"{_percent(each['robust'])} %, {each['num_examples']:,} test images"
        for kind, each in _with_scale(figures, model).items()
    ]
    lines = [
        f"[New Model] {name}",
        "",
        "# Paper Information",
        "",
        f"- **Paper Title**: {_TO_FILL_IN}",
        f"- **Paper URL**: {_TO_FILL_IN}",
        "",
        "# Leaderboard Claim(s)",
        "",
        "## Model 1",
        "",
        f"- **Architecture**: {_architecture(layout)}",
        f"- **Threat Model**: {_threat(measured)}",
        f"- **Clean accuracy**: {_percent(measured['clean']) if measured else _TO_FILL_IN}",
        f"- **Robust accuracy**: {_percent(measured['robust']) if measured else _TO_FILL_IN}",
        f"- **Evaluation method**: AutoAttack, standard version, by he_keras{_count(measured)}",
        f"- **Checkpoint and code**: {name}.pt or {name}.safetensors for the class "
        f"{_class_of(layout)}; {_TO_FILL_IN}",
        "",
        *(["AutoAttack on both outputs of the head:", "", *claims, ""] if claims else []),
        "# Model Zoo:",
        "",
        "- [ ] I want to add my models to the Model Zoo",
        "- [ ] I use an architecture that is **not** included",
        "- [ ] I agree to release my model(s) under MIT license **OR**",
        f"- [ ] I want my models to be released under a custom license: {_TO_FILL_IN}",
    ]
    return "\n".join(lines) + "\n"


def _with_scale(figures: dict[str, dict[str, Any]], model: keras.Model) -> dict[str, Any]:
    head = getattr(model, "head", None)
    if not isinstance(head, CosineHead):
        return {}
    names = {"cosines": "cosines (scale 1)", "logits": f"logits (scale {head.scale:g})"}
    return {names[kind]: figures[kind] for kind in names if kind in figures}


def _class_of(layout: Layout) -> str:
    name = _CLASSES[layout.recipe.name]
    if layout.recipe.name == "robustbench/boosting":
        return name
    options = [f"{key} {value}" for key, value in layout.recipe.options.items()]
    if "mu" in layout.tensors:
        options.append("with the buffers mu and sigma, which a subclass applies first")
    elif layout.recipe.statistics:
        statistics: Any = layout.recipe.statistics
        mean, std = statistics
        for kind, values in (("mean", mean), ("std", std)):
            options.append(f"{kind} ({', '.join(f'{value:.7g}' for value in values)})")
    return ", ".join([name, *options])


def _architecture(layout: Layout) -> str:
    family = next(each for each in _ARCHITECTURES if layout.network.startswith(each))
    return _ARCHITECTURES[family] + layout.network.removeprefix(family).replace("_", "-")


def _threat(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return _TO_FILL_IN
    norm = measured["threat"].norm
    return f"{_NORMS.get(norm, norm)}, eps = {_radius(measured['threat'])}"


def _count(measured: dict[str, Any] | None) -> str:
    return f", {measured['num_examples']:,} test images" if measured else ""


def _radius(threat: ThreatModel) -> str:
    fraction = fraction_of_255(threat.epsilon)
    if threat.norm == "linf" and fraction is not None and "." not in fraction:
        return fraction
    return f"{threat.epsilon:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"
