"""What objectives that build on another one share: the base, by any of its spellings.

`RAT` crafts at noisy weights and `AWP` computes the loss at perturbed ones. Neither assigns to a
weight: `ShownValues` shows other values to whatever computes inside it. So weights are bit for bit
what they were, whether the step runs eagerly, compiled, in half precision or on several replicas,
and nothing has to be taken back.
"""

import copy

import keras
import tensorflow as tf

from he_keras.objectives import registry
from he_keras.objectives.fast_at import FastAT
from he_keras.objectives.objective import Objective, TrainingPass
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

    def __init__(self, threat: ThreatModel | None, base, **kwargs) -> None:
        self.base = build_base(base, threat, kwargs)
        super().__init__(self.base.threat, self.base.label_smoothing)
        self.supports_jit = self.base.supports_jit
        self.batch_norm_passes = self.base.batch_norm_passes

    def at_step(self, step) -> "WrappedObjective":
        """Returns this objective, or a copy where the base's sizes follow a schedule."""
        base = self.base.at_step(step)
        if base is self.base:
            return self
        now = copy.copy(self)
        now.base, now.threat = base, base.threat
        return now

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the state of the base."""
        self.base.build(image_shape)

    def craft(self, model, images, labels, seed=(0, 0)):
        """Returns what the base crafts."""
        return self.base.craft(model, images, labels, seed)

    def forward(self, model, images, labels, x_adv, training: bool = True) -> TrainingPass:
        """`weighted_forward` with equal weights."""
        return self.weighted_forward(model, images, labels, x_adv, training)

    def weighted_forward(
        self, model, images, labels, x_adv, training: bool = True, sample_weight=None
    ) -> TrainingPass:
        """The passes of `forward`; the weights enter what is computed over the batch as a whole.

        The losses that are returned are without weights, which the model applies.
        """
        if isinstance(self.base, WrappedObjective):
            return self.base.weighted_forward(model, images, labels, x_adv, training, sample_weight)
        return self.base.forward(model, images, labels, x_adv, training)

    def train_step(self, model, images, labels, sample_weight) -> TrainingPass:
        """Updates the weights once, by `model.update`, and returns its forward pass."""
        x_adv = self.craft(model, images, labels, model.step_seed())

        def compute():
            return self.weighted_forward(model, images, labels, x_adv, True, sample_weight)

        return model.update(compute, labels, sample_weight).training_pass

    def logs(self) -> dict:
        """Returns what the base reports beside metrics."""
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

    @classmethod
    def from_config(cls, config: dict) -> "WrappedObjective":
        """Builds an objective from `get_config()`'s result."""
        options = dict(config)
        return cls(base=keras.saving.deserialize_keras_object(options.pop("base")), **options)


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
    """Raises a ValueError for a base whose step is more than one `craft` and one `forward`."""
    own_steps = (Objective.train_step, FastAT.train_step, WrappedObjective.train_step)
    is_single = type(base).train_step in own_steps and not getattr(base, "has_buffer", False)
    if not is_single:
        raise ValueError(
            f"{wrapper} cannot wrap an objective that takes over the training step or carries "
            "perturbations from batch to batch; expected one that crafts and then updates once, "
            f"such as pgd_at, trades, fast_at; received base={type(base).__name__}"
        )


def weighted(losses, sample_weight):
    """Losses times the weights of the examples, where there are any."""
    if sample_weight is None:
        return losses
    return losses * tf.cast(tf.reshape(sample_weight, [-1]), losses.dtype)
