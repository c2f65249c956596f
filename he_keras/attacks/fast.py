"""A cheap ensemble that finds nearly everything, as an upper bound on robust accuracy."""

import keras

from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.ensemble import Ensemble
from he_keras.attacks.registry import register
from he_keras.attacks.square import Square
from he_keras.threat import ThreatModel

#: Chosen: a twentieth of AutoAttack's passes, and nearly its verdicts; the figures are in
#: docs/research/attacks.md.
_FIRST_STEPS = 30
_STEPS = 50
_TARGETS = 3
_CANDIDATES = 20
_QUERIES = 100


def gradient_attacks(threat: ThreatModel, **options) -> list[Attack]:
    """Returns the attacks of `Fast` that use gradients.

    Args:
        threat: the threat model.
        **options: see `Ensemble.shared_options`.

    Example:
        >>> import he_keras as he
        >>> from he_keras.attacks.fast import gradient_attacks
        >>> [attack.name for attack in gradient_attacks(he.ThreatModel("l2", 0.5))]
        ['apgd-cw', 'apgd-nearest']
    """
    return [
        APGD(threat, "cw", _FIRST_STEPS, name="apgd-cw", **options),
        APGDTargeted(
            threat,
            "cw",
            _STEPS,
            num_targets=_TARGETS,
            target_order="distance",
            num_candidates=_CANDIDATES,
            name="apgd-nearest",
            **options,
        ),
    ]


@register("fast")
@keras.saving.register_keras_serializable(package="he_keras")
class Fast(Ensemble):
    """APGD on the margin, APGD towards the 3 nearest classes, and a short Square attack.

    Its figure is an upper bound on the robust accuracy: no example that it breaks is robust, and
    AutoAttack may break more. It is for development, and to know early what AutoAttack will say.
    Its result comes with warnings if random answers, zero gradients or a success of the queries
    after the gradients speak against that.

    Paper: none for this choice. The order of the targets is that of Melamed et al. 2024, "MALT
        powers up adversarial attacks". The attacks are those of Croce & Hein 2020 (`APGD`,
        `APGDTargeted`) and Andriushchenko et al. 2020 (`Square`).
    Assumes: logits whose gradient is useful, and 2 classes. All three losses are differences of
        logits: they do not depend on the scale of the logits, which makes cross-entropy attacks on
        cosine heads weak.
    Cost: for an example that it does not break, 10 classes: about 290 forward and 193 backward
        passes. More classes than 21 cost 11 backward passes more, however many there are.
    Deviations: against AutoAttack: no FAB, the margin as every loss, other targets first, and 30
        or 50 steps, 3 targets and 100 queries.

    Args:
        threat: the threat model.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he
        >>> fast = he.attacks.get("fast", he.ThreatModel("linf", "8/255"))
        >>> [component.name for component in fast.components]
        ['apgd-cw', 'apgd-nearest', 'square']
    """

    note = "an upper bound for development; not a robustness claim: report autoattack"

    def __init__(self, threat: ThreatModel, name: str = "fast", **kwargs) -> None:
        shared = self.shared_options(kwargs)
        square = Square(threat, num_queries=_QUERIES, name="square", **shared)
        super().__init__(threat, [*gradient_attacks(threat, **shared), square], name, **kwargs)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        config = super().get_config()
        del config["components"]
        return config


@register("screen")
@keras.saving.register_keras_serializable(package="he_keras")
class Screen(Fast):
    """The former name of `fast`: the same attack.

    Paper: none for this choice; Melamed et al. 2024 and others, see `Fast`.
    Assumes: logits whose gradient is useful, and 2 classes.
    Cost: that of `Fast`.
    Deviations: those of `Fast`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("screen", he.ThreatModel()).note[:32]
        'screen is now called fast, and i'
    """

    note = f"screen is now called fast, and is the same attack; {Fast.note}"

    def __init__(self, threat: ThreatModel, name: str = "screen", **kwargs) -> None:
        super().__init__(threat, name, **kwargs)
