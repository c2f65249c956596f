"""FastAT at large epsilon on a CPU: where it collapses, and what keeps it from collapsing.

The network of the small budget (pre-activation ResNet of three blocks, widths 16, 32, 64) with a
linear head, in bfloat16. All runs of one epsilon share everything but the objective; the guard of
`callbacks` watches and does not interfere, except for FastAdv+. Without a guard ("none") FastAT
starts at the image, as GradAlign, ELLE and FastAdv+ do here: they add to it and change nothing.
"""

from he_keras_configs import cifar10_small

#: Keys of the objective by the name that a command gives: `--config=configs/NAME.py:n_fgsm`.
GUARDS = {
    "none": {"name": "fast_at", "initialization": "zero"},
    "random_start": {"name": "fast_at", "initialization": "random"},
    "n_fgsm": {"name": "n_fgsm"},
    "grad_align": {"name": "grad_align"},
    "elle": {"name": "elle"},
    "elle_a": {"name": "elle", "adaptive": True},
    "fast_adv_plus": {"name": "fast_adv_plus", "initialization": "zero"},
}


def cifar10_small_fast_at(epsilon_in_8_bits: int, guard: str):
    """FastAT at epsilon / 255 with one of the guards, the attack in training mode as released."""
    if guard not in GUARDS:
        raise ValueError(f"Unknown guard; expected one of {tuple(GUARDS)}; received {guard!r}")
    config = cifar10_small.get_config()
    with config.unlocked():
        name = f"cifar10_small_fast_at_{epsilon_in_8_bits}"
        config.name = name if guard == "none" else f"{name}_{guard}"
        config.network.name = "preact-resnet"
        config.network.options = {"stage_widths": (16, 32, 64), "blocks_per_stage": (1, 1, 1)}
        config.head.kind = "linear"
        config.threat.epsilon = f"{epsilon_in_8_bits}/255"
        config.objective = {**GUARDS[guard], "attack_training_mode": True}
        config.train.update({"epochs": 10, "dtype": "mixed_bfloat16", "overfitting_guard": True})
        config.train.guard_on_collapse = "recover" if guard == "fast_adv_plus" else "monitor"
        config.train.guard_max_drop = 0.1
        config.train.guard_every_batches = 20
        config.evaluation.validation_attack = "pgd-10"
        config.evaluation.attacks = ("pgd-50", "apgd-dlr-50")
        config.evaluation.mode = "survivors"
        config.evaluation.step_size = f"{epsilon_in_8_bits / 4:g}/255"
    return config.lock()
