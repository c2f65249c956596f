"""`HEAdversarialModel`: a network, a head and a training objective as one Keras model.

The model's output is the head's scaled logits: the same values are trained, attacked, evaluated and
exported. The objective says what to craft and which loss to minimise; this class does what Keras
expects of a model around it: gradients, sample weights, mixed precision, replicas, metrics, saving.
"""

import pathlib
import zipfile

import keras
import tensorflow as tf

from he_keras import attacks, losses
from he_keras.attacks.attack import Attack, is_wrong, seeds_from_content
from he_keras.attacks.victim import Victim
from he_keras.layers.cosine_head import CosineHead
from he_keras.objectives import Objective, Standard
from he_keras.threat import ThreatModel

_NOISE_KEY = "objective"


@keras.saving.register_keras_serializable(package="he_keras")
class HEAdversarialModel(keras.Model):
    """Trains `head(network(images))` with an adversarial objective through `fit`.

    `fit` reports `loss`, `accuracy` (on the examples trained on) and `clean_accuracy` where the
    objective knows it. `evaluate` reports `loss` (cross-entropy of the clean images, without
    margin), `accuracy` (clean) and `robust_accuracy`.

    Args:
        network: a `keras.Model` (or layer) from images to feature vectors.
        head: `CosineHead`, `keras.layers.Dense`, or any layer from features to logits.
        objective: a training objective; default `Standard()`.
        evaluation_attack: the attack behind `robust_accuracy`: an `Attack`, a name such as "pgd-20",
            "default", or None for none. The default is PGD-20 on the margin, which a large scale
            cannot fool, against the objective's threat model.
        seed: seed of the random starts in training and evaluation.

    Example:
        >>> import he_keras as he, keras, numpy as np
        >>> network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu")])
        >>> objective = he.objectives.PGDAT(he.ThreatModel("linf", 0.1), num_steps=2)
        >>> model = he.HEAdversarialModel(network, he.CosineHead(2), objective)
        >>> model.compile(optimizer=keras.optimizers.SGD(0.1))
        >>> history = model.fit(np.ones((8, 4), "float32") / 2, np.zeros(8, int), verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
    """

    def __init__(
        self,
        network,
        head,
        objective: Objective | None = None,
        evaluation_attack: Attack | str | None = "default",
        seed: int = 0,
        **kwargs,
    ) -> None:
        _check_parts(network, head, objective)
        super().__init__(**kwargs)
        self.network = network
        self.head = head
        self.objective = Standard() if objective is None else objective
        self.seed = int(seed)
        self.evaluation_attack = _resolve_attack(evaluation_attack, self.objective.threat)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy_metric = keras.metrics.Mean(name="accuracy")
        self.clean_accuracy_metric = keras.metrics.Mean(name="clean_accuracy")
        self.robust_accuracy_metric = keras.metrics.Mean(name="robust_accuracy")
        input_shape = getattr(network, "input_shape", None) if network.built else None
        if input_shape is not None:
            self.build(input_shape)

    def build(self, input_shape) -> None:
        """Creates the weights, and the objective's state, for images of this shape."""
        if not self.network.built:
            self.network.build(input_shape)
        features = self.network.compute_output_shape(input_shape)
        if len(features) != 2:
            raise ValueError(
                "The network must end in a feature vector; expected output of shape (batch, features): add "
                f"global pooling or Flatten; received output shape {tuple(features)}"
            )
        if not self.head.built:
            self.head.build(features)
        self.objective.build(tuple(input_shape[1:]))
        self.built = True

    def call(self, inputs, training=None):
        """Returns the head's scaled logits, without margin."""
        return self.head(self.features(inputs, training=bool(training)))

    def features(self, images, training: bool = False):
        """Returns the feature vectors in front of the head."""
        return self.network(images, training=training)

    def logits(self, images, training: bool = False):
        """Returns scaled logits; the same as calling the model."""
        return self(images, training=training)

    def cosines(self, images, training: bool = False):
        """Returns the raw cosines of a `CosineHead`."""
        if not isinstance(self.head, CosineHead):
            raise ValueError(
                "This model has no cosines; expected a CosineHead; "
                f"received head={type(self.head).__name__}"
            )
        return self.head.cosines(self.features(images, training=training))

    def compile(
        self, optimizer="rmsprop", loss=None, *, jit_compile: bool = False, **kwargs
    ) -> None:
        """Configures training as `keras.Model.compile` does; the objective brings the loss.

        `jit_compile` defaults to False: on CPU an attack loop under XLA is several times slower.
        """
        if loss is not None:
            raise ValueError(
                "The objective owns the loss; expected compile() without `loss`: choose it by "
                f"HEAdversarialModel(..., objective=...); received loss={loss!r}"
            )
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1 and kwargs.get("steps_per_execution", 1) != 1:
            raise ValueError(
                "Keras cannot run several steps per execution on more than one replica; expected "
                "steps_per_execution=1; "
                f"received steps_per_execution={kwargs['steps_per_execution']}"
            )
        super().compile(optimizer=optimizer, jit_compile=jit_compile, **kwargs)

    def compile_from_config(self, config) -> None:
        """Compiles a loaded model with its saved optimizer and metrics."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @property
    def metrics(self) -> list:
        """Our own metrics, then those given to `compile`."""
        own = [
            self.loss_tracker,
            self.accuracy_metric,
            self.clean_accuracy_metric,
            self.robust_accuracy_metric,
        ]
        return own + [metric for metric in super().metrics if metric.name not in {m.name for m in own}]

    def step_seed(self):
        """Seed of this training step's random draws: a function of seed, step and replica only."""
        step = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.int32)
        return tf.stack([self.seed, step]) + tf.stack([_replica() * 7_919, 0])

    def train_step(self, data) -> dict:
        """One step of the objective."""
        images, labels, sample_weight = self._unpack(data)
        self._clean_logits_known = False
        self.objective.train_step(self, images, labels, sample_weight)
        reported = {"loss": self.loss_tracker, "accuracy": self.accuracy_metric}
        if self._clean_logits_known:
            reported["clean_accuracy"] = self.clean_accuracy_metric
        return self._results(reported, labels, self._last_logits, sample_weight)

    def update(self, compute, labels, sample_weight, watch=None):
        """Minimises the mean of `compute().losses` by one optimizer step.

        Args:
            compute: function without arguments that returns a `TrainingPass`.
            labels: integer labels, for the metrics.
            sample_weight: weight of each example, or None.
            watch: tensor whose gradient is returned, taken from the same backward pass.
        """
        watched = [] if watch is None else [watch]
        with tf.GradientTape() as tape:
            for tensor in watched:
                tape.watch(tensor)
            training_pass = compute()
            weighted = training_pass.losses
            if sample_weight is not None:
                weighted *= tf.cast(tf.reshape(sample_weight, [-1]), weighted.dtype)
            regularization = tf.add_n([tf.cast(each, weighted.dtype) for each in self.losses] or [0.0])
            total = tf.reduce_sum(weighted) / _global_count(weighted) + regularization / _replicas()
            scaled = self.optimizer.scale_loss(total)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, [*variables, *watched])
        self.optimizer.apply(gradients[: len(variables)], variables)
        self.loss_tracker.update_state(weighted + regularization)
        self.accuracy_metric.update_state(_is_right(training_pass.logits, labels))
        if training_pass.clean_logits is not None:
            self._clean_logits_known = True
            self.clean_accuracy_metric.update_state(_is_right(training_pass.clean_logits, labels))
        self._last_logits = training_pass.logits
        return gradients[-1] if watched else None

    def test_step(self, data) -> dict:
        """Scores clean images and, with an evaluation attack, the worst case of clean and attacked."""
        images, labels, sample_weight = self._unpack(data)
        logits = self(images, training=False)
        cross_entropy = losses.cross_entropy(logits, labels)
        if sample_weight is not None:
            cross_entropy *= tf.cast(tf.reshape(sample_weight, [-1]), cross_entropy.dtype)
        self.loss_tracker.update_state(cross_entropy)
        self.accuracy_metric.update_state(_is_right(logits, labels))
        reported = {"loss": self.loss_tracker, "accuracy": self.accuracy_metric}
        attack = self.evaluation_attack
        if attack is not None:
            victim = Victim(self, attack.logit_scale)
            x_adv = attack.perturb(victim, images, labels, seeds_from_content(images, attack.seed))
            attacked = _is_right(self(x_adv, training=False), labels)
            self.robust_accuracy_metric.update_state(attacked * _is_right(logits, labels))
            reported["robust_accuracy"] = self.robust_accuracy_metric
        return self._results(reported, labels, logits, sample_weight)

    def _results(self, reported: dict, labels, logits, sample_weight) -> dict:
        everything = self.compute_metrics(None, labels, logits, sample_weight=sample_weight)
        own = {"loss", "accuracy", "clean_accuracy", "robust_accuracy"}
        compiled = {name: value for name, value in everything.items() if name not in own}
        return {**{name: metric.result() for name, metric in reported.items()}, **compiled}

    def _unpack(self, data):
        images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        images = tf.convert_to_tensor(images)
        if not images.dtype.is_floating:
            raise ValueError(
                "Images must be floating-point values within the threat model's bounds; expected e.g. "
                f"images / 255.0 as float32; received dtype {images.dtype.name}"
            )
        if labels is None:
            raise ValueError("Labels are missing; expected (images, labels); received images only")
        labels = tf.convert_to_tensor(labels)
        if labels.shape.rank == 2 and labels.shape[1] != 1:
            raise ValueError(
                "Labels must be class numbers; expected shape (batch,): use labels.argmax(axis=-1) for "
                f"one-hot labels; received shape {tuple(labels.shape)}"
            )
        return tf.cast(images, tf.float32), tf.cast(tf.reshape(labels, [-1]), tf.int32), sample_weight

    def save_own_variables(self, store) -> None:
        """Saves the objective's state (such as FreeAT's perturbation) beside the weights."""
        for name, array in self.objective.state_arrays().items():
            store[f"{_NOISE_KEY}_{name}"] = array

    def load_own_variables(self, store) -> None:
        """Restores what `save_own_variables` wrote."""
        prefix = f"{_NOISE_KEY}_"
        self.objective.load_state_arrays(
            {name.removeprefix(prefix): store[name][...] for name in store.keys()}
        )

    def get_config(self) -> dict:
        """Returns network, head, objective and evaluation attack as plain data."""
        serialize = keras.saving.serialize_keras_object
        attack = self.evaluation_attack
        return {
            "name": self.name,
            "dtype": serialize(self.dtype_policy),
            "network": serialize(self.network),
            "head": serialize(self.head),
            "objective": serialize(self.objective),
            "evaluation_attack": None if attack is None else serialize(attack),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None) -> "HEAdversarialModel":
        """Builds a model from `get_config()`'s result."""
        config = dict(config)
        for key in ("network", "head", "objective", "evaluation_attack", "dtype"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(config[key], custom_objects)
        return cls(**config)


def _check_parts(network, head, objective) -> None:
    for name, part in (("network", network), ("head", head)):
        if not isinstance(part, keras.layers.Layer):
            raise TypeError(
                f"Invalid {name}; expected a keras.Model or layer; received {name}={part!r}"
            )
    if objective is not None and not isinstance(objective, Objective):
        raise TypeError(
            "Invalid objective; expected an Objective such as he_keras.objectives.PGDAT(threat); "
            f"received objective={objective!r}"
        )


def _resolve_attack(attack, threat: ThreatModel | None) -> Attack | None:
    if attack is None or isinstance(attack, Attack):
        return attack
    if threat is None:
        if attack == "default":
            return None
        raise ValueError(
            "An evaluation attack by name needs a threat model; expected an objective with one, or an "
            f"Attack; received evaluation_attack={attack!r}"
        )
    if attack == "default":
        return attacks.get("pgd-20", threat, loss="cw", name="margin-pgd-20")
    return attacks.get(attack, threat)


def _is_right(logits, labels):
    return tf.cast(~is_wrong(logits, labels), tf.float32)


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


def _replica():
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def _global_count(per_example):
    """Number of examples in the batch over all replicas, so that uneven splits weigh the same."""
    count = tf.cast(tf.size(per_example), per_example.dtype)
    if _replicas() == 1:
        return count
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, count)


def load_model(path):
    """Loads a `.keras` file, with one clear error for a missing or unreadable file.

    Example:
        >>> import he_keras as he
        >>> # model = he.load_model("runs/cifar10_small/model.keras")
    """
    path = pathlib.Path(path)
    if not path.is_file() or path.suffix != ".keras":
        raise ValueError(f"No model; expected an existing .keras file; received {path}")
    try:
        return keras.saving.load_model(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Cannot load the model; expected a .keras file; received {path}: {error}"
        ) from error
