"""PAS on MNIST with a radius that grows: --config=configs/pas_mnist.py:THREAT,SCHEDULE.

THREAT is linf (0.4), l2 (4) or linf_03 (0.3). SCHEDULE of the radius is constant, cosine or linear.
pas_mnist:THREAT,small is the cosine at a CPU's scale.

Values, sources and deviations: he_keras/experiment/catalog/pas_mnist.py. `he-keras train --list`
shows every experiment with its published numbers.
"""

from he_keras.experiment.catalog import pas_mnist


def get_config(argument: str = "linf,cosine"):
    """Returns the configuration; change values of it here, within `config.unlocked()`."""
    return pas_mnist.get_config(argument)
