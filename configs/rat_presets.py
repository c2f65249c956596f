"""Settings of RAT (Jin et al. 2023, "+1st+2nd"): its supplement's experiments and small variants.

Sources: the supplement's Tables 7 and 8 and the networks of its section B.1 (where "ResNet-18" is
the pre-activation one, the default of the released code too), and the released code for all
settings: 200 epochs, learning rate divided by ten at 100 and 150, weight decay 5e-4, batch 128,
adversary of ten steps of 2/255 at 8/255, images not standardised, linear heads.

Deviations: 1,000 training images are held out to choose the best epoch
(`--config.data.validation_examples=0` trains on all), where the paper reports the best of 22
checkpoints on the test set. The released code counts epochs from one, so that its drops and the end
of AWP's warm-up come an epoch earlier. PGD-20 and C&W-20 are at 8/255, the paper's at 0.031. The
number of RayS's queries is not stated; 10,000 is RayS's own. Batch-norm statistics come from two
passes, not from eight (`--config.objective.repeat_passes=True` where no AWP is around it).
"""

from he_keras.experiment import default_config
from he_keras_configs import budget_presets, cifar10_small

# Ten epochs of 383 batches: 49,000 images in batches of 128.
_WARM_UP_STEPS = 10 * 383
_SMOKE = {
    "network": "preact-resnet",
    "options": {"stage_widths": (8, 16), "blocks_per_stage": (1, 1), "standardize": False},
    "input_shape": (32, 32, 3),
}


def experiment(network: str, base: str, terms: bool, awp: bool = False, data: str = "cifar10"):
    """One row of the supplement's tables.

    Args:
        network: name of the network.
        base: "trades" or "at".
        terms: whether the first- and second-order terms are added.
        awp: whether the weights are perturbed, as in the released code's AWP variant.
        data: "cifar10" or "cifar100".
    """
    config = default_config()
    with config.unlocked():
        parts = [data, "rat", network.removesuffix("-bn"), base, *["awp"] * awp]
        config.name = "_".join([*parts, *["1st_2nd"] * terms]).replace("-", "_")
        config.data.name = data
        config.network = {
            "name": network,
            "input_shape": (32, 32, 3),
            "options": {"standardize": False},
        }
        config.head.update({"kind": "linear", "num_classes": 10 if data == "cifar10" else 100})
        config.objective = _objective("pgd_at" if base == "at" else base, terms, awp)
        config.optimizer.weight_decay = 5e-4
        config.schedule = {"name": "step", "drop_epochs": (100, 150), "drop_factor": 0.1}
        config.train.epochs = 200
        config.evaluation.update({"step_size": "0.003"})
        config.evaluation.attacks = ("pgd-20", "cw-linf-20", "autoattack", "rays-10000")
        config.smoke = _SMOKE
    return config.lock()


def _objective(base: str, terms: bool, awp: bool) -> dict:
    """The objective; the adversary's settings stand at the top and reach the innermost base."""
    method: dict = {"name": base}
    if terms:
        # The released AWP variant crafts without noise and weighs the second order by 0.4.
        method = {
            "name": "rat",
            "base": base,
            "mode": "released",
            "alpha": 0.2,
            "second_order_ratio": 0.4 if awp else 0.5,
            "weight_noise": 0.0 if awp else 1e-4,
            "repeat_passes": False,
        }
    if awp:
        method = {"name": "awp", "base": method, "gamma": 0.005, "warm_up_steps": _WARM_UP_STEPS}
    adversary = {"num_steps": 10, "step_size": "2/255", "random_start": "gaussian"}
    return {**method, **adversary, **({"beta": 6.0} if base == "trades" else {})}


def cifar10_small_rat():
    """The small network of `cifar10_small`, trained by FastAT with RAT's terms."""
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = "cifar10_small_rat"
        config.objective = {
            "name": "rat",
            "base": "fast_at",
            "mode": "symmetric",
            "weight_noise": 1e-4,
            "step_size": "10/255",
        }
    return config.lock()


def cifar10_small_awp():
    """The small network of `cifar10_small`, trained by FastAT at perturbed weights."""
    config = cifar10_small.get_config()
    with config.unlocked():
        config.name = "cifar10_small_awp"
        config.objective = {
            "name": "awp",
            "base": "fast_at",
            "gamma": 0.005,
            "warm_up_steps": 0,
            "step_size": "10/255",
        }
    return config.lock()


def cifar10_budget(name: str):
    """PGD-AT under the budget of `budget_presets`, with RAT's terms ("rat") or with AWP ("awp").

    A step of either costs about a fifth more than PGD-AT's: five epochs in place of six.
    """
    config = budget_presets.cifar10_budget(name, epochs=5)
    with config.unlocked():
        settings = {"rat": {"weight_noise": 1e-4}, "awp": {"gamma": 0.005}}[name]
        base = config.objective.name
        config.objective.update({"name": name, "base": base, **settings})
    return config.lock()
