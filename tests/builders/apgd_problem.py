"""A small problem for APGD: network, images, threat models."""

import functools

import numpy as np
import tensorflow as tf
from apgd_reference import CLASSES, SHAPE, TanhNetwork
from attack_victims import seeds_of

import he_keras as he
from he_keras.attacks import Victim

EXAMPLES = 12


THREATS = {"linf": he.ThreatModel("linf", 0.1), "l2": he.ThreatModel("l2", 0.5)}


NETWORK = TanhNetwork()


@functools.cache
def problem():
    """Images, many pixels at the bounds; labels, a fourth of them wrong; starts outside the box."""
    random = np.random.default_rng(3)
    images = np.clip(random.uniform(-0.2, 1.2, size=(EXAMPLES, *SHAPE)), 0, 1)
    labels = np.array([NETWORK.logits(image).argmax() for image in images], np.int32)
    labels[::4] = (labels[::4] + 1) % CLASSES
    return images, labels, images + 0.2 * random.normal(size=images.shape)


def run(attack, model=NETWORK, labels=None, images=None):
    """Runs an attack operation by operation, which for these networks is faster than compiling."""
    images = problem()[0] if images is None else images
    labels = problem()[1] if labels is None else labels
    seeds = tf.constant(seeds_of(len(images)))
    crafted = attack.run(Victim(model), tf.constant(images), tf.constant(labels), seeds)
    return crafted._replace(x_adv=crafted.x_adv.numpy())
