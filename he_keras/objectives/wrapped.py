"""What objectives that build on another one share: the base, by any of its spellings.

`RAT` crafts at noisy weights and `AWP` computes the loss at perturbed ones. Neither assigns to a
weight: inside of `VariableOverrides` everything computes with other values. So the weights stay bit
for bit what they were, and nothing has to be taken back. That holds eagerly, compiled, in half
precision and on several replicas.
"""

import keras

from he_keras.objectives import registry
from he_keras.objectives.objective import Objective, TrainingPass, TrainingStep
from he_keras.threat import ThreatModel


class WrappedObjective(Objective):
    """An objective that crafts as its base does and changes the rest of the step.

    Args:
        threat: the threat model trained against; with a base that is an objective, None or the
            base's own.
        base: an objective, the name of one, or a dictionary of its name and arguments such as
            `{"name": "trades", "beta": 6.0}`.
        **kwargs: further arguments of a base given by name.
    """

    base: Objective

    passes_arguments_on = True

    def __init__(self, threat: ThreatModel | None, base, **kwargs) -> None:
        self.base = build_base(base, threat, kwargs)
        super().__init__(
            self.base.threat,
            self.base.label_smoothing,
            self.base.epsilon_schedule,
            self.base.step_size_schedule,
        )
        self.supports_jit = self.base.supports_jit
        self.updates_per_batch = self.base.updates_per_batch
        self.batch_norm_passes = self.base.batch_norm_passes

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the state of the base."""
        self.base.build(image_shape)

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Returns what the base crafts."""
        step = TrainingStep(seed, step_number)
        return self.base.craft_in_step(model, images, labels, step)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """`forward_in_step` without a schedule and with equal weights."""
        return self.forward_in_step(model, images, labels, x_adv, TrainingStep(), training)

    def forward_in_step(self, model, images, labels, x_adv, step, training=True) -> TrainingPass:
        """Computes what the base computes."""
        return self.base.forward_in_step(model, images, labels, x_adv, step, training)

    def observe(self, observed) -> None:
        """Tells the base."""
        self.base.observe(observed)

    def logs(self) -> dict:
        """Returns what the base reports in addition to metrics."""
        return self.base.logs()

    def state_arrays(self) -> dict:
        """Returns the training state of the base."""
        return self.base.state_arrays()

    def load_state_arrays(self, arrays: dict) -> None:
        """Restores what `state_arrays` returned."""
        self.base.load_state_arrays(arrays)

    def get_config(self) -> dict:
        """Returns the base as plain data; it holds the threat model and the schedules."""
        return {"base": keras.saving.serialize_keras_object(self.base)}


def build_base(base, threat: ThreatModel | None, options: dict) -> Objective:
    """Returns the objective that `base` names, or `base` itself if it is one.

    Example:
        >>> import he_keras as he
        >>> from he_keras.objectives.wrapped import build_base
        >>> build_base({"name": "trades", "beta": 3.0}, he.ThreatModel(), {"num_steps": 7}).beta
        3.0
    """
    if isinstance(base, Objective):
        _check_given_base(base, threat, options)
        return base
    settings = {"name": base} if isinstance(base, str) else base
    if not hasattr(settings, "keys") or not isinstance(settings.get("name"), str):
        raise TypeError(
            "Invalid base; expected an Objective, the name of one, or a dictionary with the key "
            f'"name"; received base={base!r}'
        )
    arguments = {**options, **{key: settings[key] for key in settings if key != "name"}}
    return registry.get(settings["name"], threat, **arguments)


def _check_given_base(base: Objective, threat: ThreatModel | None, options: dict) -> None:
    if options:
        raise TypeError(
            "These arguments belong to the base, which is built already; expected them in the "
            f"constructor of {type(base).__name__}; received {', '.join(sorted(options))}"
        )
    if threat is not None and threat != base.threat:
        raise ValueError(
            "Two threat models; expected None or the one of the base, "
            f"{base.threat!r}; received threat={threat!r}"
        )


def check_single_update(wrapper: str, base: Objective) -> None:
    """Raises a ValueError for a base that changes its own state after an update of the weights."""
    if type(base).after_update is not Objective.after_update:
        raise ValueError(
            f"{wrapper} cannot wrap an objective that carries state from one update to the next; "
            "expected one that only crafts and computes losses, such as pgd_at, trades, fast_at; "
            f"received base={type(base).__name__}"
        )
