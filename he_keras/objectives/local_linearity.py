"""How far a loss is from linear within the threat model, and where it is furthest.

Paper: Qin et al. 2019, "Adversarial robustness through local linearization". Let `l` be the loss of
an image x, and G its gradient there. Then `g(d; x) = |l(x + d) - l(x) - <d, G>|` is the deviation
from the tangent plane at the perturbation d. `gamma(epsilon, x)` is its largest value in the ball.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from he_keras.attacks.framework.gradients import (
    adam_step,
    image_gradient,
    usable,
    zero_moments,
)
from he_keras.attacks.framework.result import Best
from he_keras.attacks.framework.rows import iterate, mask_like

OPTIMIZERS = ("adam", "sign")


class Tangent(NamedTuple):
    """The plane that touches the loss at the clean images."""

    loss: Any
    gradient: Any

    def slope(self, x_adv, images):
        """Returns `<d, G>`, what the plane rises from each image to each perturbed one."""
        product = (x_adv - images) * self.gradient
        return tf.reduce_sum(product, axis=list(range(1, product.shape.rank)))


class Search(NamedTuple):
    """How the most non-linear perturbation is searched for.

    Attributes:
        num_steps: how many steps.
        optimizer: "adam", or "sign" for steepest steps of the norm (the sign of the gradient in
            linf).
        step_size: learning rate of Adam, or length of a step.
        linear_term: whether the gradient that is followed contains that of the plane,
            `sgn * (grad l(x + d) - G)`. The released code of LLR leaves G out.
        keep: "last" or "best" iterate.
    """

    num_steps: int
    optimizer: str = "adam"
    step_size: Any = 0.1
    linear_term: bool = False
    keep: str = "last"


class _State(NamedTuple):
    x_adv: Any
    moments: Any
    best: Best


def most_nonlinear_point(
    search: Search, forward, loss_function, images, tangent: Tangent, start, threat
):
    """Searches for the perturbed images that deviate most from the tangent plane.

    Projected ascent on g(d; x); an image without deviation (at the start d = 0, for example) stays.
    Cost: `num_steps` forward and input-gradient passes, and one forward pass with `keep="best"`.

    Args:
        search: settings of the search.
        forward: function from images to logits.
        loss_function: function from logits to per-example losses.
        images: the clean images.
        tangent: loss and gradient there; constants.
        start: where the search begins, within the threat model.
        threat: the threat model.
    """

    def step(index, state: _State, _inputs) -> _State:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(state.x_adv)
            logits = forward(state.x_adv)
        loss, gradient = image_gradient(tape, loss_function, state.x_adv, logits)
        gradient = usable(gradient)
        deviation = loss - tangent.loss - tangent.slope(state.x_adv, images)
        if search.keep == "best":
            state = _record(state, deviation)
        if search.linear_term:
            gradient -= tangent.gradient
        direction = mask_like(tf.sign(deviation), gradient) * gradient
        moments = state.moments
        if search.optimizer == "adam":
            move, moments = adam_step(direction, moments, index + 1, search.step_size)
        else:
            move = search.step_size * threat.steepest_step(direction)
        return state._replace(x_adv=threat.project(state.x_adv + move, images), moments=moments)

    state = iterate(step, _initial_state(search, images, start), (), search.num_steps)
    if search.keep == "last":
        return state.x_adv
    deviation = (
        loss_function(forward(state.x_adv)) - tangent.loss - tangent.slope(state.x_adv, images)
    )
    return _record(state, deviation).best.point


def _initial_state(search: Search, images, start) -> _State:
    return _State(
        start,
        zero_moments(images) if search.optimizer == "adam" else (),
        Best.before(start if search.keep == "best" else (), images),
    )


def _record(state: _State, deviation) -> _State:
    is_no_success = tf.zeros_like(state.best.broken)
    return state._replace(best=state.best.updated(state.x_adv, tf.abs(deviation), is_no_success))
