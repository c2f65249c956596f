"""The same images under five attacks that differ in scale and loss, side by side.

Cross-entropy at the cosine head's scale 1, as the HE paper's code evaluates, finds fewer
adversarial images than the same attack on the logits that are trained and exported, and that one
fewer than attacks on the margin: no accuracy of a cosine head is shown without the others beside.
"""

import numpy as np

from he_keras.attacks import AdaptivePGD, Attack, ProjectedGradient, get
from he_keras.evaluation.attack_runs import AttackRuns
from he_keras.threat import ThreatModel

#: What each row tells, in the order of `panel_attacks`.
MEANINGS = (
    "cross-entropy on raw cosines: the HE paper's protocol, the softest",
    "cross-entropy on the logits that are trained and exported",
    "cross-entropy with scale and margin, the loss that training minimises",
    "margin of the logits: does not depend on their scale",
    "AutoAttack standard: the worst case over four attacks",
)
_NUM_STEPS = 20


def panel_attacks(threat: ThreatModel, batch_size: int) -> list[Attack]:
    """Returns the attacks of the panel."""
    settings: dict = {"num_steps": _NUM_STEPS, "batch_size": batch_size}
    return [
        ProjectedGradient(threat, logit_scale="unit", name="pgd-20, scale 1", **settings),
        ProjectedGradient(threat, name="pgd-20, model's scale", **settings),
        AdaptivePGD(threat, **{**settings, "name": "adaptive-pgd-20"}),
        ProjectedGradient(threat, loss="cw", name="margin-pgd-20", **settings),
        get("autoattack", threat, batch_size=batch_size),
    ]


def panel_of(runs: AttackRuns, sample, num_examples: int) -> dict:
    """Returns the report's "he_panel" of finished runs of `panel_attacks`."""
    rows = [
        {
            "name": row.name,
            "meaning": meaning,
            "robust_accuracy": row.robust_accuracy,
            "interval": list(row.interval),
        }
        for row, meaning in zip(runs.rows(np.arange(num_examples), sample), MEANINGS, strict=True)
    ]
    return {"num_examples": num_examples, "rows": rows}
