"""Settings that several experiments share, as the HE paper and the released codes give them.

Sources: "Boosting Adversarial Training with Hypersphere Embedding", its released code and README;
FastAT and FreeAT from their own released code, whose settings the HE paper's Table 3 uses. Where
the paper's text and the code disagree the code is followed; each configuration's header says so.
Deviation in all CIFAR-10 configurations: 1,000 training images are held out to choose the best
epoch (the released code looks at the test set); `--config.data.validation_examples=0` trains on
all.
"""

from he_keras.experiment import default_config

# Scale and margin of the released commands; FastAT and FreeAT have none for CIFAR-10.
_HE = {
    "pgd_at": (10.0, 0.2),
    "alp": (20.0, 0.3),
    "trades": (15.0, 0.2),
    "free_at": (15.0, 0.2),
    "fast_at": (15.0, 0.2),
}
_M_HE = (15.0, 0.1)
_SMOKE_OPTIONS = {"stage_widths": (16, 32), "blocks_per_stage": (1, 1)}


def cifar10(objective: str, head: str):
    """An experiment of the HE paper's Table 2 (PGD-AT, ALP, TRADES) or 3 (FreeAT, FastAT)."""
    config = default_config()
    with config.unlocked():
        config.name = f"cifar10_{objective}_{head}"
        _set_head(config, head, _M_HE if head == "m_he" else _HE[objective])
        if objective in ("pgd_at", "alp", "trades"):
            _iterated(config, objective)
        else:
            _single_pass(config, objective)
        if (objective, head) == ("pgd_at", "he"):
            config.optimizer.weight_decay = 5e-4
        config.smoke = _smoke((32, 32, 3))
    return config.lock()


def imagenet_free_at(network: str, head: str):
    """An ImageNet experiment of the HE paper's Table 4."""
    config = default_config()
    with config.unlocked():
        config.name = f"imagenet_free_at_{network.replace('-', '_')}_{head}"
        config.data.update({"name": "imagenet2012", "validation_examples": 0})
        config.network = {"name": network, "input_shape": (224, 224, 3), "options": {}}
        _set_head(config, head, (10.0, 0.2))
        config.head.num_classes = 1000
        config.threat.epsilon = "4/255"
        config.objective = {"name": "free_at", "num_replays": 4, "step_size": "4/255"}
        config.optimizer.weight_decay = 1e-4
        config.schedule = {"name": "step", "drop_epochs": (8, 16), "drop_factor": 0.1}
        config.train.update({"epochs": 23, "batch_size": 256})
        config.evaluation.update({"attacks": ("pgd-10", "pgd-50"), "step_size": "1/255"})
        config.smoke = _smoke((64, 64, 3))
    return config.lock()


def _smoke(input_shape) -> dict:
    """The network of the smoke variant."""
    return {"network": "preact-resnet", "options": _SMOKE_OPTIONS, "input_shape": input_shape}


def _set_head(config, kind: str, scale_and_margin) -> None:
    scale, margin = scale_and_margin
    config.head.update({"kind": kind, "scale": scale, "margin": margin})


def _iterated(config, objective: str) -> None:
    """Table 2: WRN-34-10, ten steps of 0.007 at epsilon 0.031 from 0.001 * N(0, I)."""
    config.network.name = "wide-resnet-34-10"
    config.threat.epsilon = "0.031"
    config.objective = {
        "name": objective,
        "num_steps": 10,
        "step_size": "0.007",
        "random_start": "gaussian",
    }
    if objective == "alp":
        config.objective.update({"beta": 0.5, "clean_weight": 0.5, "pairing": "mse"})
    if objective == "trades":
        config.objective.update({"beta": 6.0, "divergence": "kl"})
    config.schedule = {"name": "step", "drop_epochs": (75, 90), "drop_factor": 0.1}
    config.train.epochs = 100
    config.evaluation.step_size = "0.003"
    config.evaluation.attacks = (
        "pgd-20",
        "pgd-500",
        "mim-20",
        "fgsm",
        "adaptive-pgd-20",
        "cw-linf-20",
    )


def _single_pass(config, objective: str) -> None:
    """Table 3: PreActResNet-18, triangular learning rate and momentum, weight decay 5e-4."""
    config.network.name = "preact-resnet-18"
    config.optimizer.weight_decay = 5e-4
    # The released code's CyclicLR cycles the momentum too, unless told not to.
    config.schedule = {"name": "triangular", "cycle_momentum": True}
    config.evaluation.step_size = "2/255"
    config.evaluation.attacks = ("pgd-50", "adaptive-pgd-50", "cw-linf-50")
    if objective == "fast_at":
        config.objective = {
            "name": "fast_at",
            "step_size": "10/255",
            "initialization": "random",
            "attack_training_mode": True,
        }
        config.optimizer.learning_rate = 0.2
        config.train.update({"epochs": 30, "overfitting_guard": True})
    else:
        config.objective = {"name": "free_at", "num_replays": 8, "step_size": "8/255"}
        config.optimizer.learning_rate = 0.04
        config.train.epochs = 10
