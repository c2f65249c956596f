"""`HEAdversarialModel`: a network, a head and a training objective as one Keras model.

The model's output is the head's scaled logits: the same values are trained, attacked, evaluated and
exported. The objective says what to craft and which loss to minimise; this class does what Keras
expects of a model around it: gradients, sample weights, mixed precision, replicas, metrics, saving.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from he_keras import attacks, losses
from he_keras.attacks.attack import Attack, is_wrong, seeds_from_content
from he_keras.attacks.checks import check_seed
from he_keras.attacks.victim import Victim
from he_keras.distribution import keras_repairs, needs_static_shapes, replicas
from he_keras.layers.cosine_head import CosineHead
from he_keras.model_files import load_keras_file
from he_keras.networks.inference import InferenceNetwork
from he_keras.objectives import Objective, Standard, TrainingPass, training_batch
from he_keras.threat import ThreatModel

_STATE_PREFIX = "objective_"
_RANDOM_PREFIX = "random_state_"


class Update(NamedTuple):
    """What one optimizer step leaves behind: its forward pass, and the gradient asked for."""

    training_pass: TrainingPass
    watched_gradient: Any


@keras.saving.register_keras_serializable(package="he_keras")
class HEAdversarialModel(keras_repairs.Repaired):
    """Trains `head(network(images))` with an adversarial objective through `fit`.

    `fit` reports `loss`, `accuracy` (on the examples trained on) and `clean_accuracy` where the
    objective knows it. `evaluate` reports `loss` (cross-entropy of the clean images, without
    margin), `accuracy` (clean) and `robust_accuracy`. Logits are float32 under half-precision
    policies. Batches are images within the threat model's bounds and class numbers.

    Args:
        network: a `keras.Model` (or layer) from images to feature vectors.
        head: `CosineHead`, `keras.layers.Dense`, or any layer from features to logits.
        objective: a training objective; default `Standard()`.
        evaluation_attack: the attack behind `robust_accuracy`: an `Attack`, a name such as
            "pgd-20", "default", or None for none. The default is PGD-20 on the margin, which a
            large scale cannot fool, against the objective's threat model.
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
        check_seed(seed)
        super().__init__(**kwargs)
        # The network decides where half precision begins; cast to it here, an image would lose its
        # perturbation before any normalisation.
        self.autocast = False
        self.network = network
        self.head = head
        is_supported = InferenceNetwork.is_supported(network)
        self._inference_network = InferenceNetwork(network) if is_supported else None
        self.objective = Standard() if objective is None else objective
        self.seed = int(seed)
        # Keras warns and leaves XLA off for objectives whose state it cannot compile.
        self.supports_jit = self.objective.supports_jit
        self.evaluation_attack = _resolve_attack(
            evaluation_attack, self.objective.threat, self.seed
        )
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
                "The network must end in a feature vector; expected output of shape (batch, "
                "features): add global pooling or Flatten; "
                f"received output shape {tuple(features)}"
            )
        if not self.head.built:
            self.head.build(features)
        self.objective.build(tuple(input_shape[1:]))
        self.built = True

    def call(self, inputs, training=None):
        """Returns the head's scaled logits, without margin."""
        training_batch.check_floating(inputs)
        return self._scaled_logits(self.features(inputs, training=bool(training)))

    def _scaled_logits(self, features, head=None):
        logits = (head or self.head)(features)
        return keras.ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))

    def features(self, images, training: bool = False):
        """Returns the feature vectors in front of the head."""
        is_symbolic = isinstance(images, keras.KerasTensor)
        if training or is_symbolic or self._inference_network is None:
            return self.network(images, training=training)
        return self._inference_network(images)

    def with_fixed_weights(self) -> Callable:
        """Returns a function from images to scaled logits in inference mode.

        It reads the variables once, now, and so saves attacks what follows from the variables
        alone. It serves the graph in which it was made.
        """
        network = self._inference_network
        if network is None:
            return lambda images: self(images, training=False)
        weights, head = network.weights(), self.head
        if type(head) is CosineHead:
            head = head.with_fixed_kernel()
        return lambda images: self._scaled_logits(network(images, weights), head)

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

        `jit_compile` defaults to False: on CPU an attack loop under XLA is several times slower,
        and the same seed gives other random starts there.
        """
        if loss is not None:
            raise ValueError(
                "The objective owns the loss; expected compile() without `loss`: choose it by "
                f"HEAdversarialModel(..., objective=...); received loss={loss!r}"
            )
        steps = kwargs.get("steps_per_execution", 1)
        keras_repairs.check_compile(self.distribute_strategy, jit_compile, steps, optimizer)
        super().compile(optimizer=optimizer, jit_compile=jit_compile, **kwargs)

    def make_train_function(self, force: bool = False):
        """Makes the function that `fit` and `train_on_batch` call, as `keras.Model` does."""
        if self.built and self.compiled and not self.optimizer.built:
            # Variables that are first made inside the step would have it traced twice.
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force=force)

    def compile_from_config(self, config) -> None:
        """Compiles a loaded model with its saved optimizer and metrics."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @property
    def metrics(self) -> list:
        """Our own metrics, then those given to `compile`."""
        own = self._own_metrics()
        names = {metric.name for metric in own}
        return own + [metric for metric in super().metrics if metric.name not in names]

    def get_metrics_result(self) -> dict:
        """Results of the metrics in use: between steps, the ones updated since the last reset."""
        results = super().get_metrics_result()
        if tf.executing_eagerly():
            for metric in self._own_metrics():
                if not metric.count.numpy():
                    del results[metric.name]
        return results

    def _own_metrics(self) -> list:
        return [
            self.loss_tracker,
            self.accuracy_metric,
            self.clean_accuracy_metric,
            self.robust_accuracy_metric,
        ]

    def step_seed(self):
        """Seed of this training step's random draws: a function of seed, step and replica only."""
        step = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.int32)
        return tf.stack([self.seed, step]) + tf.stack([replicas.number() * 7_919, 0])

    def train_step(self, data) -> dict:
        """One step of the objective."""
        images, labels, sample_weight = training_batch.unpack(data, self.objective.threat)
        if not self.built:
            self.build(tuple(images.shape))
        images = replicas.require_examples(images, self.network)
        objective = self.objective.at_step(self._schedule_step())
        training_pass = objective.train_step(self, images, labels, sample_weight)
        reported = [self.loss_tracker, self.accuracy_metric]
        if training_pass.clean_logits is not None:
            reported.append(self.clean_accuracy_metric)
        replicas.share_statistics(self.network, tf.shape(images)[0])
        results = self._results(reported, labels, training_pass.logits, sample_weight)
        return keras_repairs.step_logs({**results, **objective.logs()})

    def _schedule_step(self):
        """The step that schedules are read at: as Keras counts for the learning rate's."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        per_update = inner.gradient_accumulation_steps
        return self.optimizer.iterations * per_update if per_update else self.optimizer.iterations

    def update(self, compute, labels, sample_weight, watch=None) -> Update:
        """Minimises the mean of `compute().losses` by one optimizer step and updates the metrics.

        Args:
            compute: function without arguments that returns a `TrainingPass`.
            labels: integer labels, for the metrics.
            sample_weight: weight of each example, or None.
            watch: tensor whose gradient is returned, taken from the same backward pass; it carries
                the loss scale of mixed precision.
        """
        watched = [] if watch is None else [watch]
        with tf.GradientTape() as tape:
            for tensor in watched:
                tape.watch(tensor)
            training_pass = compute()
            weighted = _weighted(training_pass.losses, sample_weight)
            # By the global count, uneven shares of the replicas weigh as one batch would.
            global_count = replicas.total(tf.cast(tf.size(weighted), weighted.dtype))
            regularization = tf.zeros([], weighted.dtype)
            for each in self.losses:
                regularization += tf.cast(each, weighted.dtype)
            loss = tf.reduce_sum(weighted) / global_count + regularization / replicas.count()
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, [*variables, *watched])
        gradients = keras_repairs.share_overflow(self.optimizer, gradients)
        keras_repairs.apply(self.optimizer, gradients[: len(variables)], variables)
        self.loss_tracker.update_state(weighted + regularization)
        self.accuracy_metric.update_state(_is_right(training_pass.logits, labels))
        if training_pass.clean_logits is not None:
            self.clean_accuracy_metric.update_state(_is_right(training_pass.clean_logits, labels))
        return Update(training_pass, gradients[-1] if watched else None)

    def test_step(self, data) -> dict:
        """Scores clean images and, with an evaluation attack, the worse of clean and attacked."""
        images, labels, sample_weight = training_batch.unpack(data, self.objective.threat)
        logits = self(images, training=False)
        right = _is_right(logits, labels)
        self.loss_tracker.update_state(
            _weighted(losses.cross_entropy(logits, labels), sample_weight)
        )
        self.accuracy_metric.update_state(right)
        reported = [self.loss_tracker, self.accuracy_metric]
        if self.evaluation_attack is not None:
            attacked = _is_right(self(self._attacked(images, labels), training=False), labels)
            self.robust_accuracy_metric.update_state(attacked * right)
            reported.append(self.robust_accuracy_metric)
        return keras_repairs.step_logs(self._results(reported, labels, logits, sample_weight))

    def _attacked(self, images, labels):
        attack = self.evaluation_attack
        if self.jit_compile or needs_static_shapes(self.distribute_strategy):
            # XLA needs static shapes: the verdicts are the same without dropping broken examples.
            attack = copy.copy(attack)
            attack.stop_when_broken = False
        victim = Victim(self, attack.logit_scale)
        return attack.perturb(victim, images, labels, seeds_from_content(images, attack.seed))

    def _results(self, reported: list, labels, logits, sample_weight) -> dict:
        unused = {metric.name for metric in self._own_metrics() if metric not in reported}
        self.compute_metrics(None, labels, logits, sample_weight=sample_weight)
        results = keras_repairs.metric_results(self)
        return {name: value for name, value in results.items() if name not in unused}

    def save_own_variables(self, store) -> None:
        """Saves beside the weights what Keras leaves out, and what exact continuation needs.

        That is the objective's state (such as FreeAT's perturbation) and the states of random
        layers (such as Dropout).
        """
        for name, array in self.objective.state_arrays().items():
            store[f"{_STATE_PREFIX}{name}"] = array
        for position, state in enumerate(self._random_states()):
            store[f"{_RANDOM_PREFIX}{position}"] = keras.ops.convert_to_numpy(state.value)

    def load_own_variables(self, store) -> None:
        """Restores what `save_own_variables` wrote."""
        arrays = {name: store[name][...] for name in store.keys()}
        self.objective.load_state_arrays(
            {name.removeprefix(_STATE_PREFIX): array for name, array in arrays.items()}
        )
        for position, state in enumerate(self._random_states()):
            if f"{_RANDOM_PREFIX}{position}" in arrays:
                state.assign(arrays[f"{_RANDOM_PREFIX}{position}"])

    def _random_states(self) -> list:
        return [each for each in self.network.variables if each.name == "seed_generator_state"]

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


def _resolve_attack(attack, threat: ThreatModel | None, seed: int) -> Attack | None:
    if attack is None or isinstance(attack, Attack):
        return attack
    if threat is None:
        if attack == "default":
            return None
        raise ValueError(
            "An evaluation attack by name needs a threat model; expected an objective with one, or "
            f"an Attack; received evaluation_attack={attack!r}"
        )
    if attack == "default":
        return attacks.get("pgd-20", threat, loss="cw", name="margin-pgd-20", seed=seed)
    return attacks.get(attack, threat, seed=seed)


def _is_right(logits, labels):
    return tf.cast(~is_wrong(logits, labels), tf.float32)


def _weighted(per_example, sample_weight):
    if sample_weight is None:
        return per_example
    return per_example * tf.cast(tf.reshape(sample_weight, [-1]), per_example.dtype)


def load_model(path):
    """Loads a `.keras` file, with one clear error for a missing or unreadable file.

    Example:
        >>> import he_keras as he
        >>> # model = he.load_model("runs/cifar10_small/model.keras")
    """
    return load_keras_file(path)
