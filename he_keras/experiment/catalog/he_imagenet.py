"""ImageNet experiments of the HE paper's Table 4: --config=he_imagenet:NETWORK,HEAD.

NETWORK is resnet-50, resnet-152, wide-resnet-50-2 or wide-resnet-101-2. HEAD is linear or he. The
training is FreeAT at 4/255. Nothing is held out: no best epoch is chosen, the last one counts.
"""

from collections.abc import Iterator

from he_keras.experiment.catalog import papers
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry, parse_argument
from he_keras.experiment.configuration import default_config

#: The networks, and their names in the paper's table.
NETWORKS = {
    "resnet-50": "ResNet-50",
    "resnet-152": "ResNet-152",
    "wide-resnet-50-2": "WRN-50-2",
    "wide-resnet-101-2": "WRN-101-2",
}
HEADS = ("linear", "he")
_SMOKE = {
    "network": "preact-resnet",
    "options": {"stage_widths": (16, 32), "blocks_per_stage": (1, 1)},
    "input_shape": (64, 64, 3),
}


def get_config(argument: str = "resnet-50,he"):
    """Returns the configuration of "NETWORK,HEAD"."""
    network, head = parse_argument("he_imagenet", argument, network=tuple(NETWORKS), head=HEADS)
    config = default_config()
    with config.unlocked():
        config.name = f"imagenet_free_at_{network.replace('-', '_')}_{head}"
        config.data.update({"name": "imagenet2012", "validation_examples": 0})
        config.network = {"name": network, "input_shape": (224, 224, 3), "options": {}}
        config.head.update({"kind": head, "scale": 10.0, "margin": 0.2, "num_classes": 1000})
        config.threat.epsilon = "4/255"
        config.objective = {"name": "free_at", "num_replays": 4, "step_size": "4/255"}
        config.optimizer.weight_decay = 1e-4
        config.schedule = {"name": "step", "drop_epochs": (8, 16), "drop_factor": 0.1}
        config.train.update({"epochs": 23, "batch_size": 256})
        config.evaluation.update({"attacks": ("pgd-10", "pgd-50"), "step_size": "1/255"})
        config.smoke = _SMOKE
    return config.lock()


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment of this file."""
    for network, name in NETWORKS.items():
        for head in HEADS:
            with_he = "+HE" if head == "he" else ""
            row = f"{name} FreeAT{with_he}"
            numbers = papers.quoted("he_table_4", row, "clean", "pgd10", "pgd50")
            yield ExperimentEntry(
                f"imagenet_free_at_{network.replace('-', '_')}_{head}",
                "he_imagenet",
                f"{network},{head}",
                f"ImageNet, FreeAT{with_he.replace('+', ' + ')}, {network}: Table 4 of the HE "
                "paper.",
                f"{numbers}, both measured around an already perturbed image.",
                "not stated in the paper.",
                (*_NOTES, *(_NOTES_OF_HE if with_he else ())),
            )


_NOTES = (
    "Needs imagenet2012 prepared by TFDS.",
    "Paper and code disagree on the training step: the text has 1/255, the released code",
    "(followed) 4/255. 23 epochs of 4 replays: 90 / 4, rounded up, as in the code.",
    "Nothing is held out: no best epoch is chosen, the last one counts.",
    "Batch norm: the released runs split a batch over four GPUs, which normalise 64 images each.",
)
_NOTES_OF_HE = (
    "Weights of the head: the text (followed) normalises them within the loss. The released code",
    "overwrites them in each forward pass, and its gradient leaves the normalisation out.",
)
