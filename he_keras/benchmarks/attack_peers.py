"""The same attack in each peer: functions from NumPy images and labels to adversarial images.

A peer that is not installed is left out. Each is used as its documentation shows, in eager mode
where that is how it works, on the same weights.
"""

import importlib.util
from collections.abc import Callable

import numpy as np

Attack = Callable[[np.ndarray, np.ndarray], np.ndarray]
STEP_SIZE = 2 / 255


def installed() -> list[str]:
    """Returns the peers that can be imported."""
    packages = {"cleverhans": "cleverhans", "foolbox": "foolbox", "art": "art"}
    found = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "torchattacks"))
    return found + (["torchattacks"] if has_torch else [])


def build(peer: str, attack: str, model, epsilon: float) -> Attack | None:
    """Returns the peer's version of an attack, or None where it has none."""
    return _BUILDERS[peer](attack, model, epsilon)


class PassCounter:
    """Counts examples that go through a network forward and backward."""

    forward = 0
    backward = 0

    def take(self) -> tuple[int, int]:
        """Returns the counts and sets them to zero."""
        counts = self.forward, self.backward
        self.forward = self.backward = 0
        return counts


PASSES = PassCounter()


def _counted_keras(model):
    """The Keras model as users pass it to a peer: called in eager mode, its passes counted."""
    import tensorflow as tf

    def count(name):
        def add(number):
            setattr(PASSES, name, getattr(PASSES, name) + int(number))
            return np.int32(0)

        return lambda images: tf.numpy_function(add, [tf.shape(images)[0]], tf.int32)

    @tf.custom_gradient
    def watched(images):
        with tf.control_dependencies([count("forward")(images)]):
            images = tf.identity(images)

        def gradient(upstream):
            with tf.control_dependencies([count("backward")(upstream)]):
                return tf.identity(upstream)

        return images, gradient

    return lambda images: model(watched(images), training=False)


def _cleverhans(attack: str, model, epsilon: float) -> Attack | None:
    from cleverhans.tf2.attacks import (
        fast_gradient_method,
        momentum_iterative_method,
        projected_gradient_descent,
    )

    logits = _counted_keras(model)
    fgsm = fast_gradient_method.fast_gradient_method
    pgd = projected_gradient_descent.projected_gradient_descent
    mim = momentum_iterative_method.momentum_iterative_method
    box = {"clip_min": 0.0, "clip_max": 1.0}
    loop = {"eps": epsilon, "eps_iter": STEP_SIZE, "nb_iter": 20, "norm": np.inf, **box}
    calls = {
        "fgsm": lambda x, y: fgsm(logits, x, epsilon, np.inf, y=y, **box),
        "pgd-20": lambda x, y: pgd(logits, x, y=y, rand_init=False, **loop),
        "mim-20": lambda x, y: mim(logits, x, y=y, **loop),
    }
    if attack not in calls:
        return None
    return lambda images, labels: np.asarray(calls[attack](images, labels.astype(np.int64)))


def _foolbox(attack: str, model, epsilon: float) -> Attack | None:
    import foolbox
    import tensorflow as tf

    attacks = foolbox.attacks
    built = {
        "fgsm": lambda: attacks.LinfFastGradientAttack(random_start=False),
        "pgd-20": lambda: attacks.LinfProjectedGradientDescentAttack(
            abs_stepsize=STEP_SIZE, steps=20, random_start=False
        ),
        "deepfool": lambda: attacks.LinfDeepFoolAttack(steps=50, candidates=10),
    }
    if attack not in built:
        return None
    wrapped = foolbox.TensorFlowModel(_counted_keras(model), bounds=(0, 1), device="/CPU:0")
    run = built[attack]()

    def call(images, labels):
        _, clipped, _ = run(
            wrapped, tf.constant(images), tf.constant(labels, tf.int64), epsilons=epsilon
        )
        return clipped.numpy()

    return call


def _art(attack: str, model, epsilon: float) -> Attack | None:
    import tensorflow as tf
    from art.attacks import evasion
    from art.estimators.classification import TensorFlowV2Classifier

    logits = _counted_keras(model)
    classifier = TensorFlowV2Classifier(
        lambda images, training=False: logits(images),
        nb_classes=model.head.kernel.shape[1],
        input_shape=tuple(model.network.input_shape[1:]),
        loss_object=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        clip_values=(0.0, 1.0),
    )
    shared = {"eps": epsilon, "batch_size": 128}
    # ART has switched its momentum method off for TensorFlow.
    built = {
        "fgsm": lambda: evasion.FastGradientMethod(classifier, **shared),
        "pgd-20": lambda: evasion.ProjectedGradientDescent(
            classifier, eps_step=STEP_SIZE, max_iter=20, verbose=False, **shared
        ),
    }
    if attack not in built:
        return None
    run = built[attack]()
    return lambda images, labels: run.generate(images, labels)


def _torchattacks(attack: str, model, epsilon: float) -> Attack | None:
    import torch
    import torchattacks

    from he_keras.benchmarks.network_weights import weights_of
    from he_keras.benchmarks.torch_twin import twin_of

    twin = twin_of(weights_of(model))
    _count_torch(twin)
    steps = {"eps": epsilon, "alpha": STEP_SIZE, "steps": 20}
    # The official budgets: torchattacks' defaults are 10 steps, and another schedule for Square.
    official = {"eps": epsilon, "steps": 100}
    classes = model.head.kernel.shape[1]
    parts = {
        "apgd-ce": lambda: torchattacks.APGD(twin, loss="ce", **official),
        "apgd-dlr": lambda: torchattacks.APGD(twin, loss="dlr", **official),
        "apgd-t": lambda: torchattacks.APGDT(twin, n_classes=classes, **official),
        "fab-t": lambda: torchattacks.FAB(twin, multi_targeted=True, n_classes=classes, **official),
        "square": lambda: torchattacks.Square(
            twin, eps=epsilon, n_queries=5000, resc_schedule=False
        ),
    }
    standard = ("apgd-ce", "apgd-t", "fab-t", "square")
    built = {
        "fgsm": lambda: torchattacks.FGSM(twin, eps=epsilon),
        "pgd-20": lambda: torchattacks.PGD(twin, random_start=False, **steps),
        "mim-20": lambda: torchattacks.MIFGSM(twin, **steps),
        "autoattack": lambda: torchattacks.MultiAttack([parts[part]() for part in standard]),
        **parts,
    }
    if attack not in built:
        return None
    run = built[attack]()

    def call(images, labels):
        channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        x_adv = run(channels_first, torch.from_numpy(labels.astype(np.int64)))
        return x_adv.detach().numpy().transpose(0, 2, 3, 1)

    return call


def _count_torch(twin) -> None:
    def forward(_module, inputs):
        PASSES.forward += len(inputs[0])

    def backward(_module, upstream):
        PASSES.backward += len(upstream[0])

    twin.register_forward_pre_hook(forward)
    # Every gradient of the logits passes through the head's output.
    twin.head.register_full_backward_pre_hook(backward)


_BUILDERS = {
    "cleverhans": _cleverhans,
    "foolbox": _foolbox,
    "art": _art,
    "torchattacks": _torchattacks,
}
