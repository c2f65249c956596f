"""The model card: what is known of an exported model, for programs (JSON) and for people.

Nothing in it is guessed: what nobody measured or recorded is `null`, and the page says so.
"""

import dataclasses
import datetime

from he_keras.attacks import Victim
from he_keras.environment import environment
from he_keras.evaluation.fingerprint import model_digest
from he_keras.export.calibration import Calibration
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
    "A robust accuracy is that under the listed attacks and no others: an upper bound, since an "
    "attack that nobody has tried yet may find more.",
    "Nothing is claimed about perturbations outside the threat model: a larger radius, another "
    "norm, rotations, patches, or images of another kind.",
    "Every image gets a class of the list, also one that shows none of them.",
    "Probabilities of adversarial images are not calibrated, whatever the temperature.",
)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a model comes from; None for what is not known.

    Attributes:
        name: what to call it; default: the name of the folder that it is exported to.
        source: the file or run folder that it was loaded from.
        config: the configuration it was trained with, as plain data.
        report: the `report.json` of its evaluation, as plain data.
        report_file: where that was read.
    """

    name: str | None = None
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
    """Returns the card as plain data; `docs/export.md` describes each field.

    Args:
        served: the exported model.
        name: what to call it.
        signatures: inputs and outputs by signature.
        preprocessing: what the signatures do to their images.
        provenance: what is known of the model.
        calibration: how the temperature was fitted, if it was.
        conversions: what `convert_and_score` returned, if it was called.
    """
    digest = model_digest(served.model)
    config = provenance.config or {}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": provenance.source,
        "model": _facts(served, digest),
        "class_names": list(served.class_names),
        "signatures": signatures,
        "preprocessing": preprocessing,
        "probabilities": {
            "temperature": served.temperature,
            "calibration": None if calibration is None else dataclasses.asdict(calibration),
        },
        "data": config.get("data"),
        "threat": _threat(served.model, config),
        "evaluation": evaluation_entry(provenance, digest),
        "conversions": conversions,
        "settings": provenance.config,
        "intended_use": _INTENDED_USE,
        "limits": list(_LIMITS),
        "environment": environment(),
    }


def _facts(served: ServedClassifier, digest: str | None) -> dict:
    model = served.model
    return {
        "class": type(model).__name__,
        "image_shape": list(served.image_shape),
        "num_classes": served.num_classes,
        "num_parameters": int(model.count_params()),
        "head": _head(Victim(model).head),
        "objective": type(model.objective).__name__ if hasattr(model, "objective") else None,
        "compute_dtypes": list(compute_dtypes(model)),
        "output_dtype": "float32",
        "weights_sha256": digest,
    }


def _head(head) -> dict | None:
    if head is None:
        return None
    facts: dict = {"class": type(head).__name__}
    if isinstance(head, CosineHead):
        facts.update(scale=head.scale, margin=head.margin, angle=head.angle)
    return facts


def _threat(model, config: dict) -> dict | None:
    """What the model was trained against."""
    threat = getattr(getattr(model, "objective", None), "threat", None)
    if isinstance(threat, ThreatModel):
        return threat.get_config()
    return config.get("threat")


def evaluation_entry(provenance: Provenance, digest: str | None) -> dict:
    """Returns the figures of an evaluation, if they are those of these weights.

    Args:
        provenance: holds the report, if there is one.
        digest: of the weights.
    """
    report = provenance.report
    if report is None:
        return {"status": "none", "note": "No evaluation report was found: nothing was measured."}
    evaluated = (report.get("settings") or {}).get("model")
    if evaluated is not None and evaluated != digest:
        return {
            "status": "other-weights",
            "note": "The report is of other weights than these: its figures are left out.",
            "report": provenance.report_file,
        }
    verified = evaluated is not None
    return {
        "status": "measured" if verified else "unverified",
        "note": "Measured on these very weights."
        if verified
        else "The report does not say which weights it measured.",
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


def _attack(row: dict) -> dict:
    settings = row.get("settings") or {}
    return {
        "name": row["name"],
        "robust_accuracy": row["robust_accuracy"],
        "logit_scale": settings.get("logit_scale", "model"),
    }
