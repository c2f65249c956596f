"""The same images under five attacks that differ in scale and loss, side by side.

The HE paper's code attacks the cross-entropy at scale 1. That finds fewer adversarial images than
the same attack on the logits that are trained and exported. Attacks on the margin find more than
both. So no accuracy of a cosine head is shown without the others next to it.
"""

from he_keras.attacks import AdaptivePGD, Attack, ProjectedGradient, get
from he_keras.evaluation.run.attack_runs import AttackRuns
from he_keras.evaluation.run.examples import Clean, Examples
from he_keras.evaluation.run.journal import Journal
from he_keras.evaluation.statistics import CHANCE_LEVEL, fewest_gains, resolution, wilson_interval
from he_keras.threat import ThreatModel

#: What each row tells, in the order of `panel_attacks`.
MEANINGS = (
    "cross-entropy on raw cosines: the HE paper's protocol, the softest",
    "cross-entropy on the logits that are trained and exported",
    "cross-entropy with scale and margin, the loss that training minimises",
    "margin of the logits: does not depend on their scale",
    "AutoAttack standard: the worst case over four attacks",
)
#: As in the HE paper's tables.
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


def missing_attacks(
    attacks: list[Attack], mode: str, threat: ThreatModel, batch_size: int
) -> list[Attack]:
    """Returns the attacks that the panel adds to those of an evaluation.

    Args:
        attacks: the attacks of the evaluation.
        mode: its mode; "individual" attacks have run on every example, so the panel reuses them.
        threat: the threat model.
        batch_size: examples per compiled call.
    """
    done = [attack.get_config() for attack in attacks if mode == "individual"]
    return [each for each in panel_attacks(threat, batch_size) if each.get_config() not in done]


def run_panel(whole: AttackRuns, clean: Clean, images, labels, folder, show_progress: bool) -> dict:
    """Runs the attacks of the panel on the first examples; returns the report's "he_panel".

    Args:
        whole: the finished runs of the evaluation, whose results are reused.
        clean: what the model says about the clean images.
        images: the first images.
        labels: the first labels.
        folder: of the evaluation's record; None for none.
        show_progress: show a progress bar.
    """
    count, size, threat = len(labels), whole.batch_size, whole.attacks[0].threat
    attacks = panel_attacks(threat, size)
    rest = [attack for attack in attacks if not _has_run(whole, attack, count)]
    journal = Journal(folder / "he-panel" if folder else None, whole.journal.plan)
    few = clean.first(count)
    panel = AttackRuns(rest, whole.model, whole.scorer, few, "individual", size, journal)
    few_examples = Examples(threat, (images, labels), size)
    panel.attack_all(few_examples, None, count, show_progress, "panel")
    rows = []
    for attack, meaning in zip(attacks, MEANINGS, strict=True):
        runs = panel if attack in rest else whole
        num_correct = int(runs.correct[attack.name][:count].sum())
        rows.append(
            {
                "name": attack.name,
                "meaning": meaning,
                "robust_accuracy": num_correct / count,
                "interval": list(wilson_interval(num_correct, count)),
            }
        )
    # Each row is compared with the lowest of all, so there are several chances (Bonferroni).
    needed = fewest_gains(count, 0.0, CHANCE_LEVEL / max(len(rows) - 1, 1))
    return {"num_examples": count, "resolution": resolution(needed, count, "a gap"), "rows": rows}


def _has_run(whole: AttackRuns, attack: Attack, num_examples: int) -> bool:
    """Whether an evaluation has run this very attack on each of the first examples."""
    configs = [each.get_config() for each in whole.attacks]
    is_individual = whole.mode == "individual" and attack.get_config() in configs
    return is_individual and bool(whole.done[:num_examples].all())
