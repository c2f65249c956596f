"""PGD-AT: cross-entropy on PGD examples.

Paper: Madry et al. 2018; with HE: "Boosting Adversarial Training with Hypersphere Embedding", Table
1. Where paper and released code disagree, the defaults follow the code. The start is 0.001 * N(0,
I) (paper: uniform). The step is 0.007 at epsilon 0.031 (paper: 2/255 at 8/255). The adversary sees
the scaled logits without margin (paper: unscaled).
Cost per example: K (forward + backward) + forward + full backward.
"""

import keras

from he_keras.objectives.objective import IteratedObjective
from he_keras.objectives.registry import register


@register("pgd_at")
@keras.saving.register_keras_serializable(package="he_keras")
class PGDAT(IteratedObjective):
    """Trains on the last PGD iterate.

    Batch-norm statistics come from the one adversarial training pass.

    Example:
        >>> import he_keras as he
        >>> he.objectives.PGDAT(he.ThreatModel("linf", "8/255"), num_steps=7).attack.num_steps
        7
    """
