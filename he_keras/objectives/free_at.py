"""FreeAT: adversarial training at the cost of standard training.

Paper: Shafahi et al. 2019; HE on ImageNet: "Boosting Adversarial Training with Hypersphere
Embedding", Table 4. Each mini-batch is replayed m times; one backward pass gives the gradient of
the weights and of the perturbation. The weight update uses the perturbation *before* its own
update. The perturbation persists across mini-batches and epochs; the released ImageNet code is
followed: it is kept in the ball, only the perturbed image is clipped to the box (inside the
graph, so that saturated pixels get zero gradient), and the step size is epsilon (the paper's text
says 1/255 at 4/255).

Cost per update: one forward and one full backward pass.
"""

import functools

import keras
import tensorflow as tf

from he_keras.attacks.checks import check_positive_integer
from he_keras.objectives.noise_buffer import BufferedObjective
from he_keras.objectives.objective import TrainingPass
from he_keras.objectives.registry import register
from he_keras.threat import parse_epsilon


@register("free_at")
@keras.saving.register_keras_serializable(package="he_keras")
class FreeAT(BufferedObjective):
    """Replays each batch and updates weights and perturbation from the same backward pass.

    Batch-norm statistics come from every replay's adversarial pass: the one pass serves both
    purposes. The loss of one call contains no inner maximisation: `craft` returns the clipped,
    perturbed images of the buffer.

    Args:
        threat: the threat model trained against.
        num_replays: replays m of each batch (paper: 8 on CIFAR-10, 4 on ImageNet).
        step_size: step of the perturbation; default epsilon.
        **kwargs: see `Objective`.
    """

    supports_jit = False

    def __init__(
        self, threat, num_replays: int = 4, step_size: float | str | None = None, **kwargs
    ) -> None:
        super().__init__(threat, **kwargs)
        if threat is None:
            raise ValueError("FreeAT needs a threat model; expected a ThreatModel; received None")
        check_positive_integer("num_replays", num_replays)
        self.num_replays = num_replays
        self.step_size = threat.epsilon if step_size is None else parse_epsilon(step_size)
        if self.step_size <= 0:
            raise ValueError(f"Invalid step_size; expected > 0; received step_size={step_size!r}")
        self.has_buffer = True

    def craft(self, model, images, labels, seed=(0, 0)):
        """Returns the images with the buffer's perturbation, clipped to the box."""
        return self.threat.clip_to_bounds(images + self.noise.first_rows(tf.shape(images)[0]))

    def train_step(self, model, images, labels, sample_weight) -> TrainingPass:
        """Does one backward pass and both updates, m times."""
        replay = functools.partial(self._replay, model, images, labels, sample_weight)
        # The first replay makes what variables there are still to make, which no loop can.
        return _repeat(replay, self.num_replays - 1, replay())

    def _replay(self, model, images, labels, sample_weight) -> TrainingPass:
        noise = self.noise.first_rows(tf.shape(images)[0])
        if self.epsilon_schedule is not None:
            # Left behind by a batch that may have had a larger radius.
            noise = self.threat.project_perturbation(noise)

        def compute():
            x_adv = self.threat.clip_to_bounds(images + noise)
            return self.forward(model, images, labels, x_adv, training=True)

        training_pass, gradient = model.update(compute, labels, sample_weight, watch=noise)
        # Loss scaling overflows now and then: the weights skip that step, and so does the noise.
        gradient = tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))
        step = self.step_size * self.threat.steepest_step(gradient)
        self.noise.put_first_rows(self.threat.project_perturbation(noise + step))
        return training_pass

    def get_config(self) -> dict:
        """Returns the plain-data arguments of the constructor."""
        return {
            **super().get_config(),
            "num_replays": self.num_replays,
            "step_size": self.step_size,
        }


def _repeat(replay, times: int, first: TrainingPass) -> TrainingPass:
    """Replays `times` times and returns the last pass.

    A loop of the graph is traced and compiled once. Under a strategy the replays are written out:
    replicas cannot meet inside such a loop.
    """
    if times < 2 or tf.distribute.has_strategy():
        for _ in range(times):
            first = replay()
        return first
    _, *last = tf.while_loop(
        lambda count, *_: count < times,
        lambda count, *_: (count + 1, *_tensors(replay())),
        (0, *_tensors(first)),
        parallel_iterations=1,
    )
    return first._replace(losses=last[0], logits=last[1])


def _tensors(training_pass: TrainingPass) -> tuple:
    return training_pass.losses, training_pass.logits
