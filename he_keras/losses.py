"""Per-example losses on logits, for training objectives and for attacks (which ascend them).

Every function takes logits of shape `(n, classes)` and returns shape `(n,)`. All are stable
(log-sum-exp with a shift by the maximum), where the released HE loss exponentiates directly and
overflows. Papers: C&W margin (Carlini & Wagner 2017), DLR and targeted DLR (Croce & Hein 2020).
"""

import tensorflow as tf

#: AutoAttack's: keeps the ratio finite where the logits are equal.
_DLR_FLOOR = 1e-12

#: Fewest classes each attack loss is defined for.
MIN_CLASSES = {"ce": 2, "kl": 2, "cw": 2, "dlr": 3, "dlr-targeted": 4}


def cross_entropy(logits, labels):
    """`logsumexp(o) - o_y`.

    Example:
        >>> import he_keras as he, tensorflow as tf
        >>> float(he.losses.cross_entropy(tf.constant([[0.0, 0.0]]), tf.constant([0])).numpy()[0])
        0.6931471824645996
    """
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def smoothed_cross_entropy(logits, labels, smoothing: float):
    """Cross-entropy to `1 - r` on the true class and `r / (classes - 1)` on every other one.

    Equals `cross_entropy + r * (o_y - mean of the other logits)`.

    Example:
        >>> import he_keras as he, tensorflow as tf
        >>> logits, labels = tf.constant([[3.0, 0.0]]), tf.constant([0])
        >>> round(float(he.losses.smoothed_cross_entropy(logits, labels, 0.1)[0]), 4)
        0.3486
    """
    plain = cross_entropy(logits, labels)
    true = true_logit(logits, labels)
    others = tf.reduce_sum(logits, axis=-1) - true
    num_others = tf.cast(tf.shape(logits)[-1] - 1, logits.dtype)
    return plain + smoothing * (true - others / num_others)


def kl_divergence(clean_logits, logits):
    """`sum_k q_k (log q_k - log p_k)`, q the clean and p the perturbed prediction.

    The gradient flows through both arguments; an attack passes a constant first argument.
    """
    clean_log_probabilities = tf.nn.log_softmax(clean_logits)
    difference = clean_log_probabilities - tf.nn.log_softmax(logits)
    return tf.reduce_sum(tf.exp(clean_log_probabilities) * difference, axis=-1)


def soft_cross_entropy(clean_logits, logits):
    """`-sum_k q_k log p_k`: the form the HE paper's Table 1 prints for TRADES."""
    return -tf.reduce_sum(tf.nn.softmax(clean_logits) * tf.nn.log_softmax(logits), axis=-1)


def margin(logits, labels):
    """`o_y - max_{k != y} o_k`: positive where the prediction is right."""
    return true_logit(logits, labels) - _largest_other(logits, labels)


def cw_margin(logits, labels):
    """The C&W attack loss: the negative margin, unclamped, so that its gradient never vanishes."""
    return -margin(logits, labels)


def dlr(logits, labels):
    """Difference of logits ratio, `-(o_y - max other) / (o_(1) - o_(3))`; needs 3 classes."""
    top = tf.math.top_k(logits, k=3).values
    return -margin(logits, labels) / (top[:, 0] - top[:, 2] + _DLR_FLOOR)


def dlr_targeted(logits, labels, targets):
    """Targeted DLR, `-(o_y - o_t) / (o_(1) - (o_(3) + o_(4)) / 2)`; needs 4 classes."""
    top = tf.math.top_k(logits, k=4).values
    difference = true_logit(logits, labels) - true_logit(logits, targets)
    return -difference / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + _DLR_FLOOR)


def true_logit(logits, labels):
    """`o_y` for each example."""
    # The gradient of `tf.gather` with `batch_dims` takes a hundred operations more.
    rows = tf.range(tf.shape(logits)[0])
    return tf.gather_nd(logits, tf.stack([rows, tf.cast(labels, tf.int32)], axis=1))


def _largest_other(logits, labels):
    is_true = tf.one_hot(labels, tf.shape(logits)[-1], True, False, dtype=tf.bool)
    lowest = tf.fill(tf.shape(logits), logits.dtype.min)
    return tf.reduce_max(tf.where(is_true, lowest, logits), axis=-1)


#: Losses of logits and labels that an attack can ascend by name.
ATTACK_LOSSES = {"ce": cross_entropy, "cw": cw_margin, "dlr": dlr}
#: The same for an attack towards target classes, of logits, labels and targets.
TARGETED_LOSSES = {
    "ce": lambda logits, _labels, targets: -cross_entropy(logits, targets),
    "cw": lambda logits, _labels, targets: margin(logits, targets),
    "dlr": dlr_targeted,
}
