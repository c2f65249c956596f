"""`HEAdversarialModel`: a network, a head and a training objective as one Keras model.

The model's output is the head's scaled logits: the same values are trained, attacked, evaluated and
exported. The objective says what to craft and which loss to minimise. This class does what else
Keras expects of a model: gradients, sample weights, mixed precision, replicas, metrics, saving.
"""

import functools

import keras
import tensorflow as tf

from he_keras import cpu, losses, refusals
from he_keras.arguments import check_seed, check_takes
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.result import is_wrong
from he_keras.attacks.framework.victim import Victim, check_values
from he_keras.attacks.registry import for_evaluation
from he_keras.balls import seeds_from_content
from he_keras.current_functions import CurrentFunctions
from he_keras.distribution import keras_repairs, replicas
from he_keras.layers.call_context import call_context
from he_keras.layers.cosine_head import CosineHead
from he_keras.model_files import load_keras_file
from he_keras.networks.checks import (
    check_attackable,
    check_parts,
    feature_shape,
    number_of_classes,
)
from he_keras.networks.own_network import head_for, own_network
from he_keras.objectives import (
    Objective,
    Standard,
    TrainingPass,
    TrainingStep,
    added_losses,
    training_batch,
)
from he_keras.objectives.objective import weighted
from he_keras.precision import at_least_float32
from he_keras.threat import UNIT_BOUNDS

_STATE_PREFIX = "objective_"
_RANDOM_PREFIX = "random_state_"
# Between the seeds of two replicas: a prime far above the seeds that people count up from 0. So
# replica 1 of one run does not draw what replica 0 of the next run draws.
_REPLICA_STRIDE = 7_919


@keras.saving.register_keras_serializable(package="he_keras")
class HEAdversarialModel(CurrentFunctions):
    """Trains `head(network(images))` with an adversarial objective through `fit`.

    `fit` reports `loss`, `accuracy` (on the examples trained on) and `clean_accuracy` where the
    objective knows it. `evaluate` reports `loss` (cross-entropy of the clean images, without
    margin), `accuracy` (clean) and `robust_accuracy`. Logits are float32 under half-precision
    policies. Batches are images within the threat model's bounds and class numbers.

    Args:
        network: a `keras.Model` (or layer) from images to feature vectors, subclassed ones too.
        head: `CosineHead`, `keras.layers.Dense`, or any layer from features to logits.
        objective: a training objective; default `Standard()`.
        evaluation_attack: the attack that measures `robust_accuracy`: an `Attack`, a name such as
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

    #: What `from_classifier` took out of the network: a model to map over the data, or None.
    augmentation: keras.Sequential | None = None

    def __init__(
        self,
        network,
        head,
        objective: Objective | None = None,
        evaluation_attack: Attack | str | None = "default",
        seed: int = 0,
        **kwargs,
    ) -> None:
        check_parts(network, head)
        _check_objective(objective)
        check_seed(seed)
        super().__init__(**kwargs)
        # The network decides where half precision begins. Images that were cast to it here would
        # lose their perturbation before any normalisation.
        self.autocast = False
        self.network = network
        self.head = head
        self._objective = Standard() if objective is None else objective
        self.seed = int(seed)
        # Keras warns and leaves XLA off for objectives whose state it cannot compile.
        self.supports_jit = self.objective.supports_jit
        self.evaluation_attack = evaluation_attack
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy_metric = keras.metrics.Mean(name="accuracy")
        self.clean_accuracy_metric = keras.metrics.Mean(name="clean_accuracy")
        self.robust_accuracy_metric = keras.metrics.Mean(name="robust_accuracy")
        input_shape = getattr(network, "input_shape", None) if network.built else None
        if input_shape is not None:
            self.build(input_shape)

    @property
    def objective(self) -> Objective:
        """The training objective; it stays the one that the model was built with."""
        return self._objective

    @objective.setter
    def objective(self, objective) -> None:
        raise AttributeError(
            "A model keeps its objective; expected a new one of the same parts, HEAdversarialModel("
            f"model.network, model.head, objective); received an assignment of {objective!r:.60}"
        )

    @classmethod
    def from_classifier(
        cls,
        model,
        objective: Objective | None = None,
        head: str = "he",
        scale: float | None = None,
        margin: float | None = None,
        pixels: str = "auto",
        **kwargs,
    ) -> "HEAdversarialModel":
        """Returns a model to train robustly, made of the network inside a Keras classifier.

        The network is a copy of the classifier's layers up to the last Dense layer, weights
        included. It takes images within the bounds of the objective's threat model: rescaling is
        folded into its first layer. Augmentation is taken out, which a warning says. It is handed
        back as `augmentation`, a model to map over the data.

        Args:
            model: a sequential, functional or subclassed classifier; it stays as it is.
            objective: a training objective; default `Standard()`.
            head: "he" (cosines) and "m-he" (angles) are new; "linear" keeps the last layer's
                weights.
            scale: of the cosine head; default: that of `CosineHead`.
            margin: of the cosine head; default: that of `CosineHead`.
            pixels: what the classifier takes, "0..1" or "0..255". "auto": what its first layers
                show; where they show nothing, pixels within the bounds.
            **kwargs: further arguments of `HEAdversarialModel`.

        Example:
            >>> import he_keras as he, keras
            >>> layers = [keras.Input((64,)), keras.layers.Dense(8, "relu")]
            >>> mine = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])
            >>> model = he.HEAdversarialModel.from_classifier(mine, scale=10.0)
            >>> model.network.output_shape, model.head.num_classes
            ((None, 8), 10)
        """
        _check_objective(objective)
        objective = Standard() if objective is None else objective
        bounds = UNIT_BOUNDS if objective.threat is None else objective.threat.bounds
        own = own_network(model, bounds, pixels)
        built = cls(own.network, head_for(own.head, head, scale, margin), objective, **kwargs)
        # Past Keras's bookkeeping, which would save it with the model.
        built.__dict__["augmentation"] = own.augmentation
        return built

    @property
    def evaluation_attack(self) -> Attack | None:
        """The attack that measures `robust_accuracy`, or None. It may be replaced at any time."""
        return self._evaluation_attack

    @evaluation_attack.setter
    def evaluation_attack(self, attack: Attack | str | None) -> None:
        self._evaluation_attack = for_evaluation(attack, self.objective.threat, self.seed)
        # The compiled function runs the attack that was there before.
        self.test_function = None

    def build(self, input_shape) -> None:
        """Creates the weights, and the objective's state, for images of this shape."""
        features = feature_shape(self.network, input_shape)
        self.num_classes = number_of_classes(self.head, features)
        # As one function, because Keras would wrap the shapes.
        self._check_values = functools.partial(
            check_values, self.network, self.head, tuple(input_shape), features[1]
        )
        self.objective.build(tuple(input_shape[1:]))
        self.built = True

    def call(self, inputs, training=None):
        """Returns the head's scaled logits, without margin."""
        training_batch.check_floating(inputs)
        return self._scaled_logits(self.features(inputs, training=bool(training)))

    def __call__(self, inputs, training=None, **kwargs):
        """Runs `call`, a subclass's too, and notes what its layers add to the loss in training."""
        outputs = super().__call__(inputs, training=training, **kwargs)
        if training:
            added_losses.note(self)
        return outputs

    def _scaled_logits(self, features):
        return at_least_float32(self.head(features))

    def features(self, images, training: bool = False):
        """Returns the feature vectors that the head takes."""
        faster = cpu.training_function if training else cpu.inference_function
        return faster(self.network)(images)

    def plain_logits(self, images):
        """Returns the scaled logits in inference mode as Keras computes them."""
        return cpu.plainly(functools.partial(self, training=False), images)

    @property
    def has_own_call(self) -> bool:
        """Whether a subclass computes logits in a way of its own."""
        return type(self).call is not HEAdversarialModel.call

    def with_fixed_weights(self) -> cpu.ClassifierPasses | None:
        """Returns this model's passes with the variables as they are now, to be read once.

        They serve the graph in which they were made. A subclass that computes features or logits
        in a way of its own has none.
        """
        if self.has_own_call or type(self).features is not HEAdversarialModel.features:
            return None
        features = cpu.inference_function(self.network, variables_stand_still=True)

        def logits_of_features(features):
            with call_context(training=False):
                return self._scaled_logits(features)

        return cpu.ClassifierPasses(
            lambda images: logits_of_features(features(images)), features, logits_of_features
        )

    def logits(self, images, training: bool = False):
        """Returns scaled logits: what calling the model does, beside `features` and `cosines`."""
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
        if self.evaluation_attack is not None:
            self.evaluation_attack.check_runs_inside_graphs(xla=self.jit_compile)

    def make_train_function(self, force: bool = False):
        """Makes the function that `fit` and `train_on_batch` call, as `keras.Model` does."""
        if self.built and self.compiled and not self.optimizer.built:
            # If the step itself made these variables, Keras would trace it twice.
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force=force)

    def check_values(self) -> None:
        """Refuses parts whose values are probabilities; before a step, they are not symbols."""
        self._check_values()

    def check_trainable(self) -> None:
        """Refuses networks that would undo the attack; without an attack, there is none."""
        if not isinstance(self.objective, Standard):
            check_attackable(self.network)

    def fit(self, *args, **options):
        """Trains as `keras.Model.fit` does; what it refuses is said before any work."""
        self._check_arrays(*args[:2], **{key: options[key] for key in options.keys() & {"x", "y"}})
        held_out = options.get("validation_data")
        self._check_arrays(*(held_out[:2] if isinstance(held_out, (list, tuple)) else ()))
        try:
            return super().fit(*args, **options)
        except tf.errors.InvalidArgumentError as error:
            sentence = refusals.sentence_of(error)
            if not sentence:
                raise
            raise ValueError(sentence) from None

    def _check_arrays(self, x=None, y=None) -> None:
        num_classes = self.num_classes if self.built else None
        training_batch.check_arrays(x, y, self.objective.threat, num_classes)

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
        """Seed of this batch's random draws: a function of seed, batch and replica only."""
        batch = tf.cast(tf.convert_to_tensor(keras_repairs.batches(self.optimizer)), tf.int32)
        return tf.stack([self.seed + replicas.number() * _REPLICA_STRIDE, batch])

    def train_step(self, data) -> dict:
        """One step of the objective: craft, forward, backward, update."""
        return self.compiled_with_current_settings(
            "train", self.under_xla(self._train_on)(*self._checked(data))
        )

    def _checked(self, data) -> tuple:
        """Returns images, class numbers and weights; builds the model for images of that shape."""
        images, labels, sample_weight = training_batch.unpack(data, self.objective.threat)
        if not self.built:
            self.build(tuple(images.shape))
        return training_batch.of_classes(images, labels, sample_weight, self.num_classes)

    def _train_on(self, images, labels, sample_weight) -> dict:
        images = replicas.require_examples(images, self.network)
        number = keras_repairs.schedule_step(self.optimizer)
        training_pass = _repeated(
            lambda: self._update(images, labels, sample_weight, number),
            self.objective.updates_per_batch,
        )
        reported = [self.loss_tracker, self.accuracy_metric]
        if training_pass.clean_logits is not None:
            reported.append(self.clean_accuracy_metric)
        replicas.share_statistics(self.network, tf.shape(images)[0])
        results = self._results(reported, labels, training_pass.logits, sample_weight)
        return keras_repairs.step_logs({**results, **self.objective.logs_at(number)})

    def _update(self, images, labels, sample_weight, number) -> TrainingPass:
        """Updates the weights once by the mean loss, and the metrics.

        Regularisers of weights are added once, those of activity once for each pass of the
        objective in training mode.
        """
        objective, variables = self.objective, self.trainable_variables
        step = TrainingStep(self.step_seed(), number, sample_weight)
        x_adv = objective.craft_in_step(self, images, labels, step)
        x_adv = training_batch.crafted_images(x_adv, images, objective)
        watched = [x_adv] if objective.needs_image_gradient else []
        with tf.GradientTape() as tape, added_losses.collected() as added:
            tape.watch(watched)
            training_pass = objective.forward_in_step(self, images, labels, x_adv, step)
            training_pass = training_batch.checked_pass(training_pass, images, objective)
            per_example = weighted(training_pass.losses, sample_weight)
            # By the global count, uneven shares of the replicas weigh as one batch would.
            global_count = replicas.total(tf.cast(tf.size(per_example), per_example.dtype))
            added += [each.regularizer(each) for each in variables if each.regularizer]
            regularization = sum(tf.cast(each, per_example.dtype) for each in added)
            loss = tf.reduce_sum(per_example) / global_count + regularization / replicas.count()
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [*variables, *watched])
        training_batch.check_gradients(gradients, objective)
        gradients = keras_repairs.share_overflow(self.optimizer, gradients)
        self.optimizer.apply(gradients[: len(variables)], variables)
        objective.after_update(images, x_adv, gradients[-1] if watched else None, step)
        if training_pass.observed is not None:
            objective.observe(training_pass.observed)
        self.loss_tracker.update_state(per_example + regularization)
        self.accuracy_metric.update_state(_is_right(training_pass.logits, labels))
        if training_pass.clean_logits is not None:
            self.clean_accuracy_metric.update_state(_is_right(training_pass.clean_logits, labels))
        return training_pass

    def test_step(self, data) -> dict:
        """Scores clean images and, with an evaluation attack, the worse of clean and attacked."""
        return self.compiled_with_current_settings(
            "test", self.under_xla(self._test_on)(*self._checked(data))
        )

    def _test_on(self, images, labels, sample_weight) -> dict:
        logits = self(images, training=False)
        right = _is_right(logits, labels)
        self.loss_tracker.update_state(
            weighted(losses.cross_entropy(logits, labels), sample_weight)
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
        victim = Victim(self, attack.logit_scale)
        return attack.perturb(victim, images, labels, seeds_from_content(images, attack.seed))

    def _results(self, reported: list, labels, logits, sample_weight) -> dict:
        unused = {metric.name for metric in self._own_metrics() if metric not in reported}
        self.compute_metrics(None, labels, logits, sample_weight=sample_weight)
        results = keras_repairs.metric_results(self)
        return {name: value for name, value in results.items() if name not in unused}

    def save_own_variables(self, store) -> None:
        """Saves what Keras leaves out and what a training that goes on exactly needs.

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


def _repeated(update, times: int) -> TrainingPass:
    """Calls `update` so many times and returns its last pass.

    A loop of the graph is traced and compiled once. Under a strategy the updates are written out:
    replicas cannot meet inside such a loop.
    """
    # The first update makes what variables there are still to make, which no loop can.
    training_pass = update()
    if times < 3 or tf.distribute.has_strategy():
        for _ in range(times - 1):
            training_pass = update()
        return training_pass

    def body(count, *_):
        following = update()
        return count + 1, following.losses, following.logits

    _, *last = tf.while_loop(
        lambda count, *_: count < times,
        body,
        (1, training_pass.losses, training_pass.logits),
        parallel_iterations=1,
    )
    return training_pass._replace(losses=last[0], logits=last[1])


def _check_objective(objective) -> None:
    if objective is not None and not isinstance(objective, Objective):
        raise TypeError(
            "Invalid objective; expected an Objective such as he_keras.objectives.PGDAT(threat); "
            f"received objective={objective!r}"
        )
    if objective is not None:
        name = type(objective).__name__
        check_takes(objective.craft, f"{name}.craft", "model", "images", "labels", "seed")
        forward = ("model", "images", "labels", "x_adv", "training")
        check_takes(objective.forward, f"{name}.forward", *forward)
        # It is saved with the model, at the end of hours.
        objective.get_config()


def _is_right(logits, labels):
    return tf.cast(~is_wrong(logits, labels), tf.float32)


def load_model(path):
    """Loads a `.keras` file, with one clear error for a missing or unreadable file.

    Example:
        >>> import he_keras as he
        >>> # model = he.load_model("runs/cifar10_small/model.keras")
    """
    return load_keras_file(path)
