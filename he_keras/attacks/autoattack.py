"""AutoAttack: the standard ensembles for reporting robust accuracy."""

import keras

from he_keras.arguments import check_choice
from he_keras.attacks.apgd import APGD
from he_keras.attacks.apgd_targeted import APGDTargeted
from he_keras.attacks.fab import FAB
from he_keras.attacks.fast import gradient_attacks
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.ensemble import Ensemble
from he_keras.attacks.registry import register
from he_keras.attacks.square import Square
from he_keras.threat import ThreatModel

VERSIONS = ("standard", "plus", "rand")
ORDERS = ("standard", "fast-first")
#: AutoAttack's own numbers: steps and queries, target classes, and passes for each gradient.
_BUDGET = (100, 5000)
_TARGETS = 9
_EOT_SAMPLES = 20


@keras.saving.register_keras_serializable(package="he_keras")
class AutoAttack(Ensemble):
    """AutoAttack with the official budgets: 100 steps for every gradient attack, 5,000 queries.

    standard: APGD on the cross-entropy, targeted APGD on the DLR loss (9 targets), targeted FAB (9
    targets), Square. l1: 5 restarts and a schedule of falling radii for the first, 5 targets and
    the same schedule for the second. plus: APGD-CE, APGD-DLR and FAB with 5 restarts each, Square,
    targeted APGD and FAB. rand: APGD-CE and APGD-DLR with gradients averaged over 20 passes, for
    models that draw random numbers. With fewer than 10 classes, all wrong ones are targets.

    With `order="fast-first"` the gradient attacks of `fast` run first, and all parts of AutoAttack
    run on what holds out. An example that reaches a part draws the same random numbers as without
    them. So every example that AutoAttack breaks is broken, up to rounding, and some more may be.
    The queries of `fast` are left out: they are the first ones of Square, which runs them anyway.

    Paper: Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks". For l1: Croce & Hein 2021, "Mind the box".
    Assumes: logits that depend differentiably on the image. Square, the last attack of the standard
        ensemble, is there for when they do not. Needs 4 classes (DLR); with fewer use `fast`.
    Cost: of the standard one for an example that it does not break, 10 classes: about 7,850 forward
        and 1,910 backward passes.
    Deviations: from the authors' code. None changes what an attack does to one example. Random
        numbers belong to the example and not to the batch. An example leaves an attack at the
        iterate that breaks it. Running an ensemble twice gives the same result. Theirs changes the
        restarts of FAB in "plus" after the first time.

    Args:
        threat: the threat model.
        version: "standard", "plus" or "rand".
        num_steps: steps of every gradient attack; other numbers than 100 are noted in reports.
        num_queries: queries of Square; other numbers than 5000 are noted in reports.
        order: "standard", or "fast-first" (not for "rand", whose gradients are averages).
        **kwargs: see `Attack`.

    Example:
        >>> import he_keras as he
        >>> attack = he.attacks.AutoAttack(he.ThreatModel("linf", "8/255"))
        >>> [component.name for component in attack.components]
        ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """

    def __init__(
        self,
        threat: ThreatModel,
        version: str = "standard",
        num_steps: int = 100,
        num_queries: int = 5000,
        order: str = "standard",
        name: str = "autoattack",
        **kwargs,
    ) -> None:
        check_choice("version", version, VERSIONS)
        check_choice("order", order, ORDERS)
        if (version, order) == ("rand", "fast-first"):
            raise ValueError(
                "The gradients of fast are no averages over the randomness of a model; expected "
                "order='standard' for version='rand'; received order='fast-first'"
            )
        self.version = version
        self.order = order
        self.allows_random = version == "rand"
        self.num_steps = num_steps
        self.num_queries = num_queries
        if (num_steps, num_queries) != _BUDGET:
            self.note = "not the standard budget of AutoAttack: not comparable with its results"
        shared = self.shared_options(kwargs)
        first = gradient_attacks(threat, **shared) if order == "fast-first" else []
        build = _Components(threat, num_steps, num_queries, shared)
        super().__init__(threat, [*first, *getattr(build, version)()], name, **kwargs)

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        config = super().get_config()
        del config["components"]
        return config


@register("autoattack-plus")
@keras.saving.register_keras_serializable(package="he_keras")
class AutoAttackPlus(AutoAttack):
    """The larger ensemble, with restarts and untargeted DLR and FAB.

    Paper: Croce & Hein 2020, see `AutoAttack`.
    Assumes: logits that depend differentiably on the image (but for Square), and 4 classes.
    Cost: for an example that it does not break, 10 classes: about 9,750 forward and 7,320 backward
        passes.
    Deviations: those of `AutoAttack`, no others.

    Example:
        >>> import he_keras as he
        >>> len(he.attacks.get("autoattack-plus", he.ThreatModel()).components)
        6
    """

    def __init__(self, threat: ThreatModel, **options) -> None:
        super().__init__(threat, **{"version": "plus", "name": "autoattack-plus", **options})


@register("autoattack-rand")
@keras.saving.register_keras_serializable(package="he_keras")
class AutoAttackRand(AutoAttack):
    """The ensemble for randomised models.

    Paper: Croce & Hein 2020, see `AutoAttack`.
    Assumes: logits whose gradient, averaged over 20 passes, is useful; 3 classes.
    Cost: for an example that it does not break: about 4,040 forward and backward passes.
    Deviations: those of `AutoAttack`, no others.

    Example:
        >>> import he_keras as he
        >>> he.attacks.get("autoattack-rand", he.ThreatModel()).components[0].eot_samples
        20
    """

    def __init__(self, threat: ThreatModel, **options) -> None:
        super().__init__(threat, **{"version": "rand", "name": "autoattack-rand", **options})


@register("autoattack-fast-first")
@keras.saving.register_keras_serializable(package="he_keras")
class AutoAttackFastFirst(AutoAttack):
    """AutoAttack on what `fast` leaves: its verdict is never weaker than AutoAttack's.

    Paper: Croce & Hein 2020, see `AutoAttack`, and what `Fast` names.
    Assumes: logits that depend differentiably on the image (but for Square), and 4 classes.
    Cost: that of `AutoAttack`, and for an example that it does not break, 10 classes, about 190
        forward and 193 backward passes more.
    Deviations: those of `AutoAttack`, and the two attacks that come first.

    Example:
        >>> import he_keras as he
        >>> attack = he.attacks.get("autoattack-fast-first", he.ThreatModel())
        >>> [component.name for component in attack.components]
        ['apgd-cw', 'apgd-nearest', 'apgd-ce', 'apgd-t', 'fab-t', 'square']
    """

    def __init__(self, threat: ThreatModel, **options) -> None:
        defaults = {"order": "fast-first", "name": "autoattack-fast-first"}
        super().__init__(threat, **{**defaults, **options})


register("autoattack")(AutoAttack)


class _Components:
    """Builds the attacks of each version."""

    def __init__(self, threat: ThreatModel, num_steps: int, num_queries: int, options: dict):
        self.threat = threat
        self.num_queries = num_queries
        self.options = options
        self.steps = {"num_steps": num_steps, **options}

    def standard(self) -> list[Attack]:
        is_l1 = self.threat.norm == "l1"
        return [
            self.ascent("ce", num_restarts=5 if is_l1 else 1, larger_epsilons=is_l1),
            self.targeted(num_targets=5 if is_l1 else _TARGETS, larger_epsilons=is_l1),
            self.boundary("fab-t", num_targets=_TARGETS),
            self.square(),
        ]

    def plus(self) -> list[Attack]:
        return [
            self.ascent("ce", num_restarts=5),
            self.ascent("dlr", num_restarts=5),
            self.boundary("fab", num_restarts=5),
            self.square(),
            self.targeted(num_targets=_TARGETS),
            self.boundary("fab-t", num_targets=_TARGETS),
        ]

    def rand(self) -> list[Attack]:
        return [self.ascent(loss, eot_samples=_EOT_SAMPLES) for loss in ("ce", "dlr")]

    def ascent(self, loss: str, **settings) -> Attack:
        return APGD(self.threat, loss, name=f"apgd-{loss}", **self.steps, **settings)

    def targeted(self, **settings) -> Attack:
        return APGDTargeted(self.threat, name="apgd-t", **self.steps, **settings)

    def boundary(self, name: str, **settings) -> Attack:
        return FAB(self.threat, name=name, stop_when_broken=True, **self.steps, **settings)

    def square(self) -> Attack:
        return Square(self.threat, self.num_queries, name="square", **self.options)
