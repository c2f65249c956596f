"""Seeds of random draws: each example has its own, so that the batch size changes no result."""

import tensorflow as tf

#: The first number of a seed is multiplied by this, and then targets are counted up. It is far
#: above any number of targets, so no target of one restart draws the numbers of another restart.
_TARGETS_PER_SEED = 1_000_003
#: Weights of neighbouring pixels in the hash: 2**16 divided by the golden ratio, as Knuth
#: recommends for multiplicative hashing of 16-bit numbers.
_HASH_FACTOR = 40_503
_SIXTEEN_BITS = 65_535.0


def seeds_of_target(seeds, index):
    """Returns other seeds of the same shape for the target of this index."""
    return seeds * [_TARGETS_PER_SEED, 1] + tf.stack([index + 1, 0])


def seed_per_example(seeds, images):
    """Returns seeds of shape `(n, 2)`; a single seed for the whole batch is counted up."""
    if seeds.shape.rank == 2:
        return seeds
    return seeds + tf.stack([0, 1]) * tf.range(tf.shape(images)[0])[:, tf.newaxis]


def seeds_from_content(images, seed: int):
    """Derives a seed for each example from its pixels, where positions in the data are unknown.

    The hash is exact integer arithmetic, so it does not depend on the batch size.
    """
    pixels = tf.cast(tf.reshape(images, [tf.shape(images)[0], -1]) * _SIXTEEN_BITS, tf.int32)
    weights = tf.range(1, tf.shape(pixels)[1] + 1, dtype=tf.int32) * _HASH_FACTOR
    content = tf.reduce_sum(pixels * weights, axis=1)
    return tf.stack([tf.fill(tf.shape(content), seed), content], axis=1)
