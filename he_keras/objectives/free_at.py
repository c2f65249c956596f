"""FreeAT: adversarial training at the cost of standard training.

Paper: Shafahi et al. 2019; HE on ImageNet: "Boosting Adversarial Training with Hypersphere
Embedding", Table 4. Each mini-batch is replayed m times. One backward pass gives the gradient of
the weights and of the perturbation. The weight update uses the perturbation *before* its own
update. The perturbation persists across mini-batches and epochs. As in the released ImageNet code,
it is kept in the ball. Only the perturbed image is clipped to the box, whose saturated pixels have
a zero gradient. The step size is epsilon (the paper's text says 1/255 at 4/255). That gradient is
the training loss's own. So, unlike the adversaries of PGD-AT and others, the perturbation sees the
margin of an HE head, the label smoothing and training mode. A margin alone makes that gradient
longer, and leaves its direction and so the step.

Cost per update: one forward and one full backward pass.
"""

import keras
import numpy as np
import tensorflow as tf

from he_keras.arguments import check_positive_integer, parse_epsilon
from he_keras.attacks.framework.gradients import usable
from he_keras.distribution import replicas
from he_keras.objectives.objective import Objective
from he_keras.objectives.registry import register
from he_keras.threat import ThreatModel


@register("free_at")
@keras.saving.register_keras_serializable(package="he_keras")
class FreeAT(Objective):
    """Replays each batch and updates weights and perturbation from the same backward pass.

    Batch-norm statistics come from every replay's adversarial pass: the one pass serves both
    purposes. There is no inner maximisation: `craft` returns the images with the perturbation that
    earlier updates left, clipped to the box. The perturbation is part of the training state:
    checkpoints and `.keras` files hold it.

    Args:
        threat: the threat model trained against.
        num_replays: replays m of each batch (paper: 8 on CIFAR-10, 4 on ImageNet).
        step_size: step of the perturbation; default epsilon.
        **kwargs: see `Objective`.
    """

    threat: ThreatModel
    supports_jit = False
    needs_image_gradient = True

    def __init__(
        self, threat, num_replays: int = 4, step_size: float | str | None = None, **kwargs
    ) -> None:
        super().__init__(threat, **kwargs)
        if threat is None:
            raise ValueError("FreeAT needs a threat model; expected a ThreatModel; received None")
        check_positive_integer("num_replays", num_replays)
        self.num_replays = self.updates_per_batch = num_replays
        self.step_size = threat.epsilon if step_size is None else parse_epsilon(step_size)
        if self.step_size <= 0:
            raise ValueError(f"Invalid step_size; expected > 0; received step_size={step_size!r}")
        self._buffer: NoiseBuffer | None = None

    @property
    def noise(self) -> "NoiseBuffer":
        """The perturbation, which `build` creates."""
        if self._buffer is None:
            raise ValueError(
                "The objective has no perturbation buffer yet; expected a model that was built; "
                "received an objective before build(image_shape)"
            )
        return self._buffer

    def build(self, image_shape: tuple[int, ...]) -> None:
        """Creates the perturbation."""
        if self._buffer is None:
            self._buffer = NoiseBuffer(image_shape)

    def craft(self, model, images, labels, seed=(0, 0), step_number=None):
        """Returns the images with their perturbation, clipped to the box."""
        return self.threat.clip_to_bounds(images + self._perturbation(images, step_number))

    def after_update(self, images, x_adv, gradient, step) -> None:
        """Moves the perturbation along the gradient that the update of the weights came with."""
        sizes, noise = self.sizes_at(step.number), self._perturbation(images, step.number)
        low, high = self.threat.bounds
        is_inside = (images + noise >= low) & (images + noise <= high)
        # Loss scaling overflows now and then: the weights skip that step, and so does the noise.
        gradient = tf.where(is_inside, usable(gradient), 0.0)
        moved = noise + sizes.step_size(self.step_size) * self.threat.steepest_step(gradient)
        self.noise.put_first_rows(sizes.threat.project_perturbation(moved))

    def _perturbation(self, images, step_number):
        noise = self.noise.first_rows(tf.shape(images)[0])
        if self.epsilon_schedule is None:
            return noise
        # Left by a batch that may have had a larger radius.
        return self.sizes_at(step_number).threat.project_perturbation(noise)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The perturbation."""
        return {} if self._buffer is None else self._buffer.to_arrays()

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores the perturbation."""
        if self._buffer is not None:
            self._buffer.from_arrays(arrays)


class NoiseBuffer:
    """One perturbation for each position in the batch; a short batch uses the first rows.

    The buffer grows with zeros to the largest batch seen. Under a distribution strategy each
    replica has a buffer of its own.
    """

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        self._variable = replicas.own_variable(
            np.zeros([0, *image_shape], np.float32), "noise", [None, *image_shape]
        )

    def first_rows(self, count):
        """Returns `count` rows; rows never written are zero."""
        stored = self._variable.read_value()
        missing = tf.maximum(count - tf.shape(stored)[0], 0)
        padding = tf.zeros(tf.concat([[missing], tf.shape(stored)[1:]], axis=0))
        rows = tf.concat([stored, padding], axis=0)[:count]
        return tf.ensure_shape(rows, self._variable.shape)

    def put_first_rows(self, rows) -> None:
        """Overwrites the first rows and keeps the others."""
        rest = self._variable.read_value()[tf.shape(rows)[0] :]
        self._variable.assign(tf.concat([rows, rest], axis=0))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the content for each replica."""
        copies = enumerate(replicas.copies(self._variable))
        return {f"noise_{number}": each.numpy() for number, each in copies}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what `to_arrays` returned; replicas that are not in it keep their content."""
        for number, each in enumerate(replicas.copies(self._variable)):
            if f"noise_{number}" in arrays:
                each.assign(tf.constant(arrays[f"noise_{number}"], tf.float32))
