"""A cheap ensemble for use during development."""

import keras

from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.framework.ensemble import Ensemble
from he_keras.attacks.registry import register
from he_keras.attacks.square import Square
from he_keras.threat import ThreatModel

#: Chosen: less than a tenth of AutoAttack's passes, and nearly its verdicts; the figures are in
#: docs/research/attacks.md.
_STEPS = 30
_TARGETS = 5
_QUERIES = 100


@register("screen")
@keras.saving.register_keras_serializable(package="he_keras")
class Screen(Ensemble):
    """APGD on the margin, targeted APGD with 5 targets, and a short Square attack.

    It is for development, not for reporting: 30 steps each and 100 queries. At less than a tenth of
    its passes it estimates what AutoAttack would give, from above: no example that it breaks is
    robust. Its result comes with warnings if random answers, zero gradients or a success of the
    queries after the gradients speak against that.

    Paper: none for this choice; its attacks are those of Croce & Hein 2020 (`APGD`, `APGDTargeted`)
        and Andriushchenko et al. 2020 (`Square`).
    Assumes: logits whose gradient is useful, and 2 classes. All three losses are differences of
        logits: they do not depend on the scale of the logits, which makes cross-entropy attacks on
        cosine heads weak.
    Cost: for an example that it does not break, 10 classes: about 290 forward and 186 backward
        passes.
    Deviations: against AutoAttack: no FAB, the margin as every loss, and the smaller budgets above.

    Args:
        threat: the threat model.
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he
        >>> screen = he.attacks.get("screen", he.ThreatModel("linf", "8/255"))
        >>> [component.name for component in screen.components]
        ['apgd-cw', 'apgd-t', 'square']
    """

    note = "screening for development; not a robustness claim: report autoattack"

    def __init__(self, threat: ThreatModel, name: str = "screen", **kwargs) -> None:
        shared = self.shared_options(kwargs)
        components = [
            APGD(threat, loss="cw", num_steps=_STEPS, name="apgd-cw", **shared),
            APGDTargeted(
                threat,
                loss="cw",
                num_steps=_STEPS,
                num_targets=_TARGETS,
                name="apgd-t",
                **shared,
            ),
            Square(threat, num_queries=_QUERIES, name="square", **shared),
        ]
        super().__init__(threat, components, name, **kwargs)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        config = super().get_config()
        del config["components"]
        return config
