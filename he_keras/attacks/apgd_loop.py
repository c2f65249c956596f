"""The loop of APGD from one start: evaluate, remember the best point, adapt the step, move."""

from typing import Any, NamedTuple

import tensorflow as tf

from he_keras.attacks.apgd_steps import MomentumSteps, SparseSteps
from he_keras.attacks.attack import is_wrong
from he_keras.attacks.gradients import loss_and_gradient
from he_keras.attacks.survivors import iterate, select_rows
from he_keras.attacks.victim import Victim
from he_keras.threat import ThreatModel


class State(NamedTuple):
    """Loop state; every entry has one row per example.

    Attributes:
        point: the point to evaluate next.
        previous: the point evaluated last, or the best one where the search was taken up there.
        best: the evaluated point of the largest loss.
        best_gradient: its gradient.
        best_loss: its loss.
        adversarial: the latest misclassified point; the start where there is none.
        broken: a misclassified point was found.
        ended: no more passes are spent on this example.
        step_size: length of the next step.
        memory: what the rule of the steps remembers.
        passes: forward and backward passes spent.
    """

    point: Any
    previous: Any
    best: Any
    best_gradient: Any
    best_loss: Any
    adversarial: Any
    broken: Any
    ended: Any
    step_size: Any
    memory: Any
    passes: Any


class Ascent:
    """Ascends a loss inside one ball.

    Every iteration evaluates the point that the one before has moved to, so that `num_steps` steps
    are `num_steps + 1` passes through one and the same traced body.

    Args:
        threat: the threat model.
        num_steps: number of steps.
        rho: see `MomentumSteps`.
        eot_samples: passes over which the gradient of a randomised model is averaged.
        stop_when_broken: an example ends at its first misclassified point.
        continues: see `SparseSteps`.
    """

    def __init__(
        self,
        threat: ThreatModel,
        num_steps: int,
        rho: float = 0.75,
        eot_samples: int = 1,
        stop_when_broken: bool = True,
        continues: bool = False,
    ) -> None:
        self.threat = threat
        self.num_steps = num_steps
        self.eot_samples = eot_samples
        self.stop_when_broken = stop_when_broken
        self.rule: Any = (
            SparseSteps(threat, num_steps, continues)
            if threat.norm == "l1"
            else MomentumSteps(threat, num_steps, rho)
        )

    def run(self, victim: Victim, loss_function, inputs, start, skip=None) -> State:
        """Returns the final state.

        Args:
            victim: the classifier.
            loss_function: function of the logits and of `inputs` after the images.
            inputs: images, labels, and whatever else the loss takes for each example.
            start: the points to start from; they are projected first.
            skip: mask of examples to leave alone.
        """

        def step(index, state, inputs):
            return self.step(victim, loss_function, index, state, inputs)

        state = self.initial_state(inputs[0], start, skip)
        may_end = self.stop_when_broken or skip is not None
        is_active = (lambda state: ~state.ended) if may_end else None
        return iterate(step, state, inputs, self.num_steps + 1, is_active)

    def initial_state(self, images, start, skip=None) -> State:
        """The state before the start has been evaluated."""
        start = self.threat.project(start, images)
        passes = tf.zeros(tf.shape(images)[:1], tf.int32)
        nothing = tf.zeros_like(passes, tf.bool)
        first_step = self.rule.first_length * self.threat.epsilon
        return State(
            point=start,
            previous=start,
            best=start,
            best_gradient=tf.zeros_like(images),
            best_loss=tf.fill(tf.shape(passes), images.dtype.min),
            adversarial=start,
            broken=nothing,
            ended=nothing if skip is None else skip,
            step_size=tf.fill(tf.shape(passes), tf.constant(first_step, images.dtype)),
            memory=self.rule.initial_memory(images, start),
            passes=passes,
        )

    def step(self, victim: Victim, loss_function, index, state: State, inputs) -> State:
        """Evaluates the current point and moves on; the last move is not evaluated."""
        images, labels = inputs[:2]
        logits, loss, gradient = loss_and_gradient(
            victim,
            lambda logits: loss_function(logits, *inputs[1:]),
            state.point,
            self.eot_samples,
        )
        loss = tf.cast(loss, images.dtype)
        wrong = is_wrong(logits, labels)
        state = self._record(index, state, wrong, loss, gradient)
        memory, step_size, restart = self.rule.adapt(index, state, loss, images)
        state = state._replace(memory=memory, step_size=step_size)
        best = state.best, state.best_gradient
        point, gradient = select_rows(restart, best, (state.point, gradient))
        moved = self.rule.move(index, state, point, gradient, images)
        return state._replace(point=moved, previous=point)

    def _record(self, index, state: State, wrong, loss, gradient) -> State:
        better = (index == 0) | (loss > state.best_loss)
        best = state.best, state.best_gradient, state.best_loss
        best, best_gradient, best_loss = select_rows(better, (state.point, gradient, loss), best)
        return state._replace(
            best=best,
            best_gradient=best_gradient,
            best_loss=best_loss,
            adversarial=select_rows(wrong, state.point, state.adversarial),
            broken=state.broken | wrong,
            ended=state.ended | wrong if self.stop_when_broken else state.ended,
            passes=state.passes + self.eot_samples,
        )
