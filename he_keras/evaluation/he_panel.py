"""The same images under five attacks that differ in scale and loss, side by side.

Cross-entropy at the cosine head's scale 1, as the HE paper's code evaluates, finds fewer
adversarial images than the same attack on the logits that are trained and exported, and that one
fewer than attacks on the margin: no accuracy of a cosine head is shown without the others beside.
"""

from he_keras.attacks import AdaptivePGD, Attack, ProjectedGradient, get
from he_keras.evaluation.attack_runs import AttackRuns
from he_keras.evaluation.intervals import wilson_interval
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


def panel_of(panel: AttackRuns, whole: AttackRuns, num_examples: int) -> dict:
    """Returns the report's "he_panel".

    Args:
        panel: finished runs of `panel_attacks`, but for those that `whole` has.
        whole: the runs of the evaluation.
        num_examples: how many examples the panel is about, from the first.
    """
    rows = []
    for attack, meaning in zip(
        panel_attacks(whole.attacks[0].threat, panel.batch_size), MEANINGS, strict=True
    ):
        runs = whole if has_run(whole, attack) else panel
        num_correct = int(runs.correct[attack.name][:num_examples].sum())
        rows.append(
            {
                "name": attack.name,
                "meaning": meaning,
                "robust_accuracy": num_correct / num_examples,
                "interval": list(wilson_interval(num_correct, num_examples)),
            }
        )
    return {"num_examples": num_examples, "rows": rows}


def has_run(whole: AttackRuns, attack: Attack) -> bool:
    """Whether an evaluation has run this very attack on every example."""
    configs = [each.get_config() for each in whole.attacks]
    return whole.mode == "individual" and attack.get_config() in configs
