"""One classifier out of several: the mean of their predicted probabilities.

Paper: Liu et al. 2020, "On the loss landscape of adversarial training" (PAS), whose tool averages
the softmax of snapshots and attacks the ensemble by ascending `-log(mean_k p_k(y))`.

The output is `log(mean_k softmax(o_k))`. Logarithms of probabilities that sum to 1 are logits of
these very probabilities: softmax is `exp(z) / sum(exp(z))`, and with `z = log p` the sum is 1. So
softmax of the output is the mean prediction, and the cross-entropy of the output is
`-log(mean_k p_k(y))`. Attacks and reports that expect logits need no special case, and an attack on
the cross-entropy ascends the paper's loss, through all members. A mean of logits would be another
classifier: its probabilities are normalised geometric means.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from he_keras.attacks.framework.victim import check_not_probabilities
from he_keras.model_files import load_classifier
from he_keras.precision import at_least_float32
from he_keras.threat import ThreatModel, bounds_of, trained_threat


@keras.saving.register_keras_serializable(package="he_keras")
class SnapshotEnsemble(keras.Model):
    """Averages the probabilities of its members; always in inference mode.

    Every attack and `evaluate_robustness` accept it, and it can be saved as `.keras`. It holds the
    members themselves and no copies. Cost: one pass through every member.

    Args:
        members: at least one `keras.Model` from images to logits, all of the same images and
            classes. `he.wrap_classifier` makes such models of others, and takes ensembles too.
        **kwargs: `name` and such of `keras.Model`.

    Example:
        >>> import keras, numpy as np
        >>> from he_keras.snapshot_ensemble import SnapshotEnsemble
        >>> members = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]) for _ in "ab"]
        >>> members[0].set_weights([np.zeros((2, 2)), np.log([0.9, 0.1])])
        >>> members[1].set_weights([np.zeros((2, 2)), np.log([0.5, 0.5])])
        >>> logits = SnapshotEnsemble(members)(np.ones((1, 2), "float32"))
        >>> [round(float(each), 3) for each in keras.ops.softmax(logits)[0]]
        [0.7, 0.3]
    """

    def __init__(self, members: Sequence[keras.Model], **kwargs) -> None:
        members = list(members)
        if not members or not all(isinstance(each, keras.Model) for each in members):
            raise TypeError(
                "Invalid members of an ensemble; expected at least one keras.Model; "
                f"received members={members!r}"
            )
        if len({id(each) for each in members}) < len(members):
            raise ValueError(
                "A member counts once; expected different models; received one of them twice"
            )
        if len({bounds_of(each) for each in members}) > 1:
            raise ValueError(
                "The members take different pixel values; expected the same bounds; received "
                f"{[bounds_of(each) for each in members]}"
            )
        super().__init__(**kwargs)
        # Each member decides for itself where half precision begins.
        self.autocast = False
        self.members = members

    @classmethod
    def from_files(cls, paths: Iterable, **kwargs) -> "SnapshotEnsemble":
        """Builds an ensemble of `.keras` files and run folders.

        A folder of snapshots, such as `runs/NAME/snapshots`, stands for all of them.
        """
        files = [file for path in paths for file in _files(pathlib.Path(path))]
        return cls([load_classifier(file) for file in files], **kwargs)

    def with_members(self, prepare: Callable) -> "SnapshotEnsemble":
        """Returns an ensemble of `prepare(member)`; this one if that changes no member."""
        members = [prepare(each) for each in self.members]
        is_same = all(new is old for new, old in zip(members, self.members, strict=True))
        return self if is_same else type(self)(members, name=self.name)

    @property
    def conversion(self) -> str:
        """What `wrap_classifier` did to the members, if anything."""
        done = dict.fromkeys(getattr(each, "conversion", "") for each in self.members)
        return "; ".join(filter(None, done))

    @property
    def threat(self) -> ThreatModel | None:
        """What all members were trained with, if that is the same."""
        threats = {trained_threat(member) for member in self.members}
        return threats.pop() if len(threats) == 1 else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the images that all members take."""
        return bounds_of(self.members[0])

    @property
    def input_shape(self) -> tuple:
        """The shape of a batch of images, which export asks for."""
        first = self.members[0]
        return getattr(first, "network", first).input_shape

    def build(self, input_shape) -> None:
        """Builds members that are not."""
        for member in self.members:
            if not member.built:
                member.build(input_shape)
        self.built = True

    def call(self, inputs, training=None):
        """Returns the logarithm of the mean probabilities, in float32 or better."""
        logits = [at_least_float32(member(inputs, training=False)) for member in self.members]
        if tf.executing_eagerly():
            # The mean of their softmax would hide it from the attacks, which check the same.
            for member, each in zip(self.members, logits, strict=True):
                check_not_probabilities(each.numpy(), member)
        logs = [tf.nn.log_softmax(each) for each in logits]
        if len({log.shape[-1] for log in logs}) > 1:
            raise ValueError(
                "The members differ in their classes; expected the same number; received "
                f"{[log.shape[-1] for log in logs]}"
            )
        total = tf.reduce_logsumexp(tf.stack(logs), axis=0)
        return total - tf.cast(np.log(len(logs)), total.dtype)

    def get_config(self) -> dict:
        """Returns the members as plain data, without their optimizers."""
        members = [keras.saving.serialize_keras_object(each) for each in self.members]
        for member in members:
            member.pop("compile_config", None)
        return {"name": self.name, "members": members}

    @classmethod
    def from_config(cls, config, custom_objects=None) -> "SnapshotEnsemble":
        """Builds an ensemble from `get_config()`'s result."""
        options = dict(config)
        members = options.pop("members")
        deserialize = keras.saving.deserialize_keras_object
        return cls([deserialize(each, custom_objects) for each in members], **options)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The path itself, or the snapshots in a folder that holds nothing but some."""
    snapshots = sorted(path.glob("epoch-*.keras")) if path.is_dir() else []
    return snapshots or [path]
