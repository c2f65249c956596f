"""Transfer attack: adversarial images for one classifier, scored on another."""

import keras
import tensorflow as tf

from he_keras.arguments import check_choice, reason_of
from he_keras.attacks.framework.attack import Attack
from he_keras.attacks.framework.result import Crafted
from he_keras.attacks.framework.victim import Victim
from he_keras.attacks.projected_gradient import MIM, PGD, ProjectedGradient
from he_keras.attacks.registry import register
from he_keras.model_files import load_classifier
from he_keras.threat import ThreatModel

_METHODS = {"pgd": PGD, "mim": MIM}


@register("transfer", argument="path")
@keras.saving.register_keras_serializable(package="he_keras")
class Transfer(Attack):
    """Projected gradient ascent on a substitute that is loaded from a file.

    PGD or MIM runs on the substitute. The last iterate of every image is scored on the attacked
    model.

    Paper: Pang et al. 2020, the HE paper, Appendix C.4; for the steps, see `PGD` and `MIM`.
    Assumes: a substitute with a useful gradient, and nothing about the attacked model. That model
        is only asked for its predictions, so hiding its gradient does not help it. How strong the
        attack is depends on how alike the two models are, and a high accuracy under it proves
        little.
    Cost: `num_steps` forward and backward passes through the substitute, which show in the running
        time only. Passes in the result are passes through the attacked model: the scoring, no
        gradient.
    Deviations: from the papers' protocol. Images that the attacked model gets wrong from the start
        count as broken and are left alone. `stop_when_broken=False` attacks them too. Nothing is
        chosen by success.

    Args:
        threat: the threat model.
        path: file of the substitute, see `he_keras.model_files.load_classifier`; loaded here, and
            again when the attack is restored from its configuration. It must return logits of
            images within the threat model's bounds: `he.wrap_classifier` makes such a model.
        num_steps: number of steps on the substitute.
        step_size: length of a step; default as in `ProjectedGradient`.
        method: "pgd" or "mim".
        random_start: see `ProjectedGradient`; default True for "pgd" and False for "mim".
        loss: the substitute's loss to increase, see `ProjectedGradient`.
        logit_scale: scale of the substitute's logits, see `Victim`.
        stop_when_broken: True leaves images alone that the attacked model misclassifies from the
            start. False attacks them too, as the papers do. The substitute's verdicts never stop
            anything.
        keep: "last", or "best" for the iterate that is strongest on the substitute.
        **kwargs: see `Attack`. With `num_restarts` above 1 the attacked model's verdict chooses
            among the restarts.

    Example:
        >>> import he_keras as he, keras, numpy as np, tempfile
        >>> head = keras.layers.Dense(2, kernel_initializer="identity")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     keras.Sequential([keras.Input((2,)), head]).save(f"{folder}/substitute.keras")
        ...     threat = he.ThreatModel("linf", 0.1)
        ...     attack = he.attacks.get(f"transfer:{folder}/substitute.keras", threat)
        >>> images = np.array([[0.55, 0.5]], "float32")
        >>> attack(lambda images: images, images, np.array([0])).success.tolist()
        [True]
    """

    #: It uses none of the attacked model's gradient.
    uses_gradient = False

    def __init__(
        self,
        threat: ThreatModel,
        path: str,
        num_steps: int = 20,
        step_size: float | str | None = None,
        method: str = "pgd",
        random_start: bool | float | str | None = None,
        loss: str = "ce",
        keep: str = "last",
        name: str = "transfer",
        **kwargs,
    ) -> None:
        super().__init__(threat, keep=keep, name=name, **kwargs)
        check_choice("method", method, _METHODS)
        start = {} if random_start is None else {"random_start": random_start}
        self.path = str(path)
        self.method = method
        self.ascent: ProjectedGradient = _METHODS[method](
            threat,
            num_steps,
            step_size=step_size,
            loss=loss,
            keep=keep,
            stop_when_broken=False,
            **start,
        )
        self.num_steps = self.ascent.num_steps
        self.step_size = self.ascent.step_size
        self.random_start = self.ascent.random_start
        self.loss = loss
        self.min_classes = self.ascent.min_classes
        self.has_targeted_form = self.ascent.has_targeted_form
        self._substitute = Victim(load_classifier(self.path), self.logit_scale)

    @property
    def substitute(self) -> Victim:
        """The classifier that the images are crafted for."""
        return self._substitute

    def replace_substitute(self, model) -> None:
        """Takes a model in place of the loaded one, such as what `wrap_classifier` made of it."""
        self._substitute = Victim(model, self.logit_scale)

    def run(self, victim: Victim, images, labels, seeds, targets=None) -> Crafted:
        """Crafts on the substitute; the attacked model is not asked."""
        substitute = self.substitute.for_many_passes()
        x_adv = self.ascent.run(substitute, images, labels, seeds, targets).x_adv
        passes = tf.zeros_like(labels)
        return Crafted(x_adv, passes, passes)

    def check_model(self, model, images, labels) -> None:
        """Checks the attacked model, and that the substitute takes the same images."""
        super().check_model(model, images, labels)
        try:
            super().check_model(self.substitute.model, images, labels)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise ValueError(
                "The substitute does not fit; expected a classifier of the same images and "
                f"classes; received {self.path}: {reason_of(error)}"
            ) from error
