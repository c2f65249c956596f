"""A cheap ensemble for use during development: not for reporting."""

import keras

from he_keras.attacks.apgd import APGD, APGDTargeted
from he_keras.attacks.ensemble import Ensemble
from he_keras.attacks.registry import register
from he_keras.attacks.square import Square
from he_keras.threat import ThreatModel

_STEPS = 30
_TARGETS = 5
_QUERIES = 100


@register("screen")
@keras.saving.register_keras_serializable(package="he_keras")
class Screen(Ensemble):
    """APGD on the margin, targeted APGD with 5 targets, and a short Square attack.

    All three losses are differences of logits: they do not depend on the scale of the logits, which
    makes cross-entropy attacks on cosine heads weak. 30 steps each, 100 queries. It estimates what
    AutoAttack would give at less than a tenth of its passes, from above: no example that it breaks
    is robust. Assumes logits whose gradient is useful; where its own signs (random answers, zero
    gradients, success of the queries after the gradients failed) speak against that, its result
    comes with warnings. Needs 2 classes. Cost for an example that it does not break, 10 classes:
    about 290 forward and 186 backward passes.

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

    @classmethod
    def from_config(cls, config: dict) -> "Screen":
        """Builds the ensemble from `get_config()`'s result."""
        threat = keras.saving.deserialize_keras_object(config["threat"])
        return cls(**{**config, "threat": threat})
