"""The model card: what is known about an exported model, as JSON and as a page.

The card contains no guesses: what nobody measured or recorded is `null`, and the page says so.
"""

import dataclasses
import datetime
import pathlib

from he_keras.attacks import Victim
from he_keras.environment import environment
from he_keras.evaluation.run.facts import shown, weights_digest
from he_keras.evaluation.run.identity import function_differences, has_answers
from he_keras.export.calibration import Calibration
from he_keras.export.declarations import adversary, article_15
from he_keras.export.float32_copy import compute_dtypes
from he_keras.export.served_classifier import ServedClassifier
from he_keras.layers.cosine_head import CosineHead
from he_keras.threat import ThreatModel

SCHEMA_VERSION = 1
_REPORTED = ("attacks", "clean_accuracy", "num_examples", "threat", "worst_case")
_ATTACK_KEYS = ("name", "robust_accuracy")
_INTENDED_USE = (
    "Classifying images of the kind that the model was trained on, where small perturbations "
    "within the threat model are expected; research on adversarial robustness."
)
_LIMITS = (
    "A robust accuracy holds for the listed attacks only. It is an upper bound, because an attack "
    "that nobody has tried yet may find more.",
    "Nothing is claimed about perturbations outside the threat model: a larger radius, another "
    "norm, rotations, patches, or images of another kind.",
    "Every image gets a class of the list, even if it shows none of them.",
    "Probabilities of adversarial images are not calibrated, whatever the temperature is.",
)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a model comes from. What is not known is None.

    Attributes:
        source: the file or run folder that the model was loaded from.
        config: the configuration of its training, as plain data.
        report: the `report.json` of its evaluation, as plain data.
        report_file: the file that the report was read from.
    """

    source: str | None = None
    config: dict | None = None
    report: dict | None = None
    report_file: str | None = None

    def __post_init__(self) -> None:
        if self.report is not None:
            _check_report(self.report, self.report_file)


def _check_report(report, path: str | None) -> None:
    """Raises a ValueError unless a report holds the figures that the card shows."""
    rows = report.get("attacks") if isinstance(report, dict) else None
    is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    wanted = [(report, name) for name in _REPORTED] if is_list else []
    wanted += [(row, name) for row in rows or () for name in _ATTACK_KEYS] if is_list else []
    if not is_list or any(name not in content for content, name in wanted):
        raise ValueError(
            f"Not the report of an evaluation; expected {', '.join(_REPORTED)} and for each attack "
            f"{', '.join(_ATTACK_KEYS)}; received {path or 'something else'}"
        )


def model_card(
    served: ServedClassifier,
    name: str,
    signatures: dict,
    preprocessing: dict,
    provenance: Provenance,
    calibration: Calibration | None = None,
    conversions: dict | None = None,
) -> dict:
    """Returns the card as plain data; `docs/reference/exported_model.md` describes each field.

    Args:
        served: the exported model.
        name: the model's name.
        signatures: the inputs and outputs of each signature.
        preprocessing: what the signatures do to their images.
        provenance: where the model comes from.
        calibration: how the temperature was fitted, if it was fitted.
        conversions: what `convert_and_score` returned, if there are conversions.
    """
    config = provenance.config or {}
    evaluation = evaluation_entry(provenance, served.model)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": provenance.source,
        "model": _facts(served),
        "class_names": list(served.class_names),
        "signatures": signatures,
        "preprocessing": preprocessing,
        "probabilities": {
            "temperature": served.temperature,
            "calibration": None if calibration is None else dataclasses.asdict(calibration),
        },
        "data": config.get("data"),
        "threat": _threat(served.model, config),
        "evaluation": evaluation,
        "nist_ai_100_2": adversary(evaluation, served.model),
        "eu_ai_act_article_15": article_15(evaluation, served.model, provenance.report),
        "conversions": conversions,
        "settings": provenance.config,
        "intended_use": _INTENDED_USE,
        "limits": list(_LIMITS),
        "environment": environment(),
    }


def _facts(served: ServedClassifier) -> dict:
    model = served.model
    return {
        "class": type(model).__name__,
        "conversion": getattr(model, "conversion", None),
        "image_shape": list(served.image_shape),
        "bounds": list(served.bounds),
        "num_classes": served.num_classes,
        "num_parameters": int(model.count_params()),
        "head": _head(Victim(model).head),
        "objective": type(model.objective).__name__ if hasattr(model, "objective") else None,
        "compute_dtypes": list(compute_dtypes(model)),
        "output_dtype": "float32",
        "weights_sha256": weights_digest(model),
    }


def _head(head) -> dict | None:
    if head is None:
        return None
    facts: dict = {"class": type(head).__name__}
    if isinstance(head, CosineHead):
        facts.update(scale=head.scale, margin=head.margin, angle=head.angle)
    return facts


def _threat(model, config: dict) -> dict | None:
    """The threat model that the model was trained against."""
    threat = getattr(getattr(model, "objective", None), "threat", None)
    if isinstance(threat, ThreatModel):
        return threat.get_config()
    return config.get("threat")


def evaluation_entry(provenance: Provenance, model) -> dict:
    """Returns the results of an evaluation, if it measured this very model.

    Args:
        provenance: contains the report, if there is one.
        model: the exported model.
    """
    report = provenance.report
    if report is None:
        return {"status": "none", "note": "No evaluation report was found: nothing was measured."}
    found, note = _compared(provenance, model)
    if found:
        return {
            "status": "other-model",
            "note": f"The report is of another model ({shown(found)}): its figures are left out.",
            "report": provenance.report_file,
        }
    return {
        "status": "unverified" if note else "measured",
        "note": note or "Measured on this very model.",
        "report": provenance.report_file,
        "created": report.get("created"),
        "num_examples": report["num_examples"],
        "threat": report["threat"],
        "mode": report.get("mode"),
        "protocol": report.get("protocol"),
        "clean_accuracy": report["clean_accuracy"],
        "clean_interval": report.get("clean_interval"),
        "worst_case": report["worst_case"],
        "worst_case_interval": report.get("worst_case_interval"),
        "attacks": [_attack(row) for row in report["attacks"]],
        "checks": report.get("checks") or [],
    }


def _compared(provenance: Provenance, model) -> tuple[list[str], str]:
    """How the model differs from the one in the report, and why that may be unknown."""
    recorded = ((provenance.report or {}).get("settings") or {}).get("model")
    if isinstance(recorded, dict):
        file = provenance.report_file
        folder = pathlib.Path(file).parent if file else None
        is_known = folder is not None and has_answers(folder)
        note = "" if is_known else "The report is of such a model; its answers are not with it."
        return function_differences(model, recorded, folder), note
    if recorded is None:
        return [], "The report does not say which model it measured."
    # An earlier he_keras recorded the digest of the weights only.
    found = [] if recorded == weights_digest(model) else ["weights: others"]
    return found, "The report is of these weights; whether of this head, it does not say."


def _attack(row: dict) -> dict:
    settings = row.get("settings") or {}
    return {
        "name": row["name"],
        "robust_accuracy": row["robust_accuracy"],
        "logit_scale": settings.get("logit_scale", "model"),
    }
