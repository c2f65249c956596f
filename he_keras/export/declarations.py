"""What the record says in the terms of NIST AI 100-2, and for Article 15 of the EU AI Act.

Both are another reading of the card's own figures. What nobody measured is None. Nothing here says
that a model conforms to anything.

Sources: NIST AI 100-2e2025, "Adversarial Machine Learning: A Taxonomy and Terminology of Attacks
    and Mitigations"; Regulation (EU) 2024/1689, Article 15, paragraphs 3 to 5.
"""

from he_keras.attacks import get
from he_keras.attacks.framework.ensemble import parts
from he_keras.objectives import Standard
from he_keras.threat import ThreatModel, trained_threat

_NOT_ASSESSED = ("poisoning attacks", "privacy attacks")
_NO_CLAIM = (
    "Facts of the record for those who declare under Article 15. This is no statement of "
    "conformity, and it says nothing about the system that the model is a part of."
)


def adversary(evaluation: dict, model) -> dict:
    """Returns the adversary of an evaluation in the terms of NIST AI 100-2.

    Args:
        evaluation: the card's entry of that name.
        model: the model, which may know its training objective.

    Example:
        >>> from he_keras.export.declarations import adversary
        >>> found = adversary({"status": "none"}, model=None)
        >>> found["attack"], found["not_assessed"]
        (None, ['poisoning attacks', 'privacy attacks'])
    """
    is_attacked = "attacks" in evaluation
    return {
        "terms": "NIST AI 100-2e2025",
        "attack": "evasion" if is_attacked else None,
        "objective": "integrity violation" if is_attacked else None,
        "knowledge": _knowledge(evaluation) if is_attacked else None,
        "capability": _capability(evaluation) if is_attacked else None,
        "mitigation": _mitigation(model),
        "not_assessed": list(_NOT_ASSESSED),
    }


def article_15(evaluation: dict, model, report: dict | None) -> dict:
    """Returns what the record says about accuracy, robustness and adversarial examples.

    Args:
        evaluation: the card's entry of that name.
        model: the model.
        report: the whole report that the entry was made of.
    """
    is_measured = "clean_accuracy" in evaluation
    corruptions = (report or {}).get("corruptions") if is_measured else None
    return {
        "note": _NO_CLAIM,
        "evidence": {"status": evaluation["status"], "report": evaluation.get("report")},
        "accuracy": _share(evaluation, "clean", "accuracy on test images") if is_measured else None,
        "robustness_to_errors": _corruptions(corruptions) if corruptions else None,
        "cybersecurity": {
            "adversarial_examples": {
                "measure": (_mitigation(model) or {}).get("kind"),
                "tested": _tested(evaluation) if is_measured else None,
            },
            "data_poisoning": None,
            "model_poisoning": None,
            "confidentiality_attacks": None,
        },
    }


def _mitigation(model) -> dict | None:
    """Adversarial training, where the model knows its objective."""
    objective, threat = getattr(model, "objective", None), trained_threat(model)
    # It takes a threat model too, but only to measure with.
    if threat is None or objective is None or isinstance(objective, Standard):
        return None
    name = type(objective).__name__
    return {"kind": "adversarial training", "objective": name, "threat": threat.get_config()}


def _knowledge(evaluation: dict) -> dict:
    """The attacks by what they know; an attack that no name leads to is unknown."""
    found: dict[str, list[str]] = {"white_box": [], "black_box": [], "unknown": []}
    for row in evaluation["attacks"]:
        for name, kind in _kinds(row["name"], evaluation["threat"]):
            found[kind].append(name)
    return found


def _kinds(name: str, threat: dict) -> list[tuple[str, str]]:
    if name.startswith("transfer:"):
        # Building it would load the other model.
        return [(name, "black_box")]
    try:
        attack = get(name, ThreatModel(**threat))
    except (TypeError, ValueError):
        return [(name, "unknown")]
    components = parts(attack)
    return [
        (
            name if len(components) == 1 else f"{name}: {each.name}",
            "white_box" if each.uses_gradient else "black_box",
        )
        for each in components
    ]


def _capability(evaluation: dict) -> dict:
    threat = evaluation["threat"]
    return {"kind": "testing data control", "perturbation": threat}


def _share(evaluation: dict, name: str, metric: str) -> dict:
    value = evaluation["clean_accuracy" if name == "clean" else name]
    return {
        "metric": metric,
        "value": value,
        "interval": evaluation.get(f"{name}_interval"),
        "num_examples": evaluation["num_examples"],
    }


def _tested(evaluation: dict) -> dict:
    return {
        **_share(evaluation, "worst_case", "accuracy in the worst case over the attacks"),
        "threat": evaluation["threat"],
        "attacks": [row["name"] for row in evaluation["attacks"]],
    }


def _corruptions(section: dict) -> dict:
    return {
        "metric": "mean accuracy on corrupted test images",
        "value": section.get("mean_corruption_accuracy"),
        "num_examples": section.get("num_images"),
        "source": section.get("source"),
    }
