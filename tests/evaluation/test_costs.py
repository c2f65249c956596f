"""What the console says of the cost beforehand, against the passes that are counted."""

import numpy as np
import pytest
import tensorflow as tf

import he_keras as he
from he_keras.evaluation import epsilon_curve, preflight, sanity_checks
from he_keras.evaluation.run import cost

THREAT = he.ThreatModel("linf", 0.01)
NUM_IMAGES = 16


class CountedModel:
    """Holds out against everything small, and counts the images that pass it."""

    def __init__(self):
        self.passes = 0

    def counted(self, values):
        def add(number):
            self.passes += int(number)
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(add, [tf.shape(values)[0]], tf.int32)]):
            return tf.identity(values)

    def __call__(self, images):
        @tf.custom_gradient
        def watched(values):
            return self.counted(values), self.counted

        return 10.0 * watched(tf.reshape(images, [-1, 64])[:, :10])


def examples():
    images = np.random.default_rng(0).uniform(0.0, 0.2, (NUM_IMAGES, 8, 8, 1)).astype(np.float32)
    labels = np.arange(NUM_IMAGES) % 10
    images.reshape(NUM_IMAGES, 64)[np.arange(NUM_IMAGES), labels] = 1.0
    return images, labels


@pytest.mark.parametrize(
    ("name", "passes"),
    [("autoattack", 9760), ("autoattack-plus", 17070), ("autoattack-rand", 8080), ("fast", 474)],
)
def test_ensembles_cost_what_their_documentation_says(name, passes):
    attack = he.attacks.get(name, THREAT)
    assert attack.most_passes(10) == pytest.approx(passes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("fgsm", {}, 3),
        ("pgd-20", {"num_restarts": 3}, 123),
        ("pgd-20", {"eot_samples": 4}, 161),
        ("apgd-t-100", {"num_targets": 3}, 603),
        ("multi-targeted-20", {}, 369),
        ("fab-10", {}, 111),
        ("feature-50", {"num_targets": 200}, 20_200),
        ("square-1000", {}, 1001),
        ("spsa-10", {"num_samples": 8}, 170),
        ("cw-l2", {"num_steps": 10, "binary_search_steps": 3}, 61),
    ],
)
def test_every_attack_says_what_it_costs(name, options, passes):
    """Counted by hand for ten classes."""
    threat = he.ThreatModel("l2", 0.5) if name == "cw-l2" else THREAT
    assert he.attacks.get(name, threat, **options).most_passes(10) == passes


def test_an_attack_of_ones_own_costs_two_passes_a_step():
    attack = he.attacks.Attack(THREAT, num_restarts=2)
    assert attack.most_passes(10) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pgd-5", "cw-linf-5", "apgd-ce-5", "square-20", "fgsm"])
def test_attacks_cost_what_is_counted(name):
    model, attack = CountedModel(), he.attacks.get(name, THREAT)
    result = attack(model, *examples())
    assert not result.success.any()
    counted = (result.forward_passes + result.backward_passes).mean()
    assert counted == pytest.approx(attack.most_passes(10), abs=3)


@pytest.mark.slow
def test_the_checks_cost_what_is_said():
    model, (images, labels) = CountedModel(), examples()
    assert len(preflight(model, images, labels, THREAT))
    before = model.passes
    curve = epsilon_curve(model, images, labels, THREAT)
    sanity_checks(model, images, labels, THREAT, curve=curve)
    after = (model.passes - before) / NUM_IMAGES
    # The preflight looks at up to 128 images, here at 16.
    said = cost.passes_of_checks(0), cost.passes_of_checks(1) - cost.passes_of_checks(0)
    assert before <= said[0]
    assert 0.6 * said[1] < after <= said[1]
