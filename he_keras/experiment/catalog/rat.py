"""RAT ("+1st+2nd") of its supplement's tables: --config=rat:DATA,NETWORK,BASE,TERMS.

DATA is cifar10 or cifar100. NETWORK is preact-resnet-18, wide-resnet-34-10, vgg-16 or mobilenet-v2.
BASE is at, trades or trades_awp. TERMS is none (the baseline) or 1st_2nd.

Sources: the supplement of "Randomized Adversarial Training via Taylor Expansion" (Jin et al. 2023),
its Tables 7 and 8 and the networks of its section B.1. "ResNet-18" is the pre-activation one there,
which is the default of the released code too. The released code has all settings: 200 epochs, batch
128, weight decay 5e-4, and a learning rate divided by ten at 100 and 150. The adversary takes ten
steps of 2/255 at 8/255. Images are not standardised, and heads are linear.

Deviations: 1,000 training images are held out to choose the best epoch
(`--config.data.validation_examples=0` trains on all). The paper reports the best of 22 checkpoints
on the test set. The released code counts epochs from one, so that its drops and the end of AWP's
warm-up come an epoch earlier. PGD-20 and C&W-20 are at 8/255, the paper's at 0.031. The number of
RayS's queries is not stated. 10,000 is RayS's own. Batch-norm statistics come from two passes, not
from eight (`--config.objective.repeat_passes=True` where no AWP is around it).
"""

from collections.abc import Iterator

from he_keras.experiment.catalog import papers
from he_keras.experiment.catalog.experiment_entry import ExperimentEntry, parse_argument
from he_keras.experiment.configuration import default_config

#: The networks by their name in an argument: the registered name, and the one of headers.
NETWORKS = {
    "preact-resnet-18": ("preact-resnet-18", "PreActResNet-18"),
    "wide-resnet-34-10": ("wide-resnet-34-10", "WRN-34-10"),
    "vgg-16": ("vgg-16-bn", "VGG-16"),
    "mobilenet-v2": ("mobilenet-v2", "MobileNetV2"),
}
BASES = ("at", "trades", "trades_awp")
TERMS = ("none", "1st_2nd")
CLASSES = {"cifar10": 10, "cifar100": 100}
# Ten epochs of 383 batches: 49,000 images in batches of 128.
_WARM_UP_STEPS = 10 * 383


def get_config(argument: str = "cifar10,preact-resnet-18,trades,1st_2nd"):
    """Returns the configuration of "DATA,NETWORK,BASE,TERMS"."""
    data, network, base, terms = parse_argument(
        "rat", argument, data=tuple(CLASSES), network=tuple(NETWORKS), base=BASES, terms=TERMS
    )
    config = default_config()
    with config.unlocked():
        config.name = _name(data, network, base, terms)
        config.data.name = data
        config.network = {
            "name": NETWORKS[network][0],
            "input_shape": (32, 32, 3),
            "options": {"standardize": False},
        }
        config.head.update({"kind": "linear", "num_classes": CLASSES[data]})
        config.objective = _objective(base, terms == "1st_2nd")
        config.optimizer.weight_decay = 5e-4
        config.schedule = {"name": "step", "drop_epochs": (100, 150), "drop_factor": 0.1}
        config.train.epochs = 200
        config.evaluation.update({"step_size": "0.003"})
        config.evaluation.attacks = ("pgd-20", "cw-linf-20", "autoattack", "rays-10000")
        config.smoke = {
            "network": "preact-resnet",
            "options": {"stage_widths": (8, 16), "blocks_per_stage": (1, 1), "standardize": False},
            "input_shape": (32, 32, 3),
        }
    return config.lock()


def _name(data: str, network: str, base: str, terms: str) -> str:
    parts = [data, "rat", network, base, *(["1st_2nd"] if terms == "1st_2nd" else [])]
    return "_".join(parts).replace("-", "_")


def _objective(base: str, has_terms: bool) -> dict:
    """The objective; the adversary's settings stand at the top and reach the innermost base."""
    awp = base == "trades_awp"
    method: dict = {"name": "pgd_at" if base == "at" else "trades"}
    if has_terms:
        # The released AWP variant crafts without noise and weighs the second order by 0.4.
        method = {
            "name": "rat",
            "base": method["name"],
            "mode": "released",
            "alpha": 0.2,
            "second_order_ratio": 0.4 if awp else 0.5,
            "weight_noise": 0.0 if awp else 1e-4,
            "repeat_passes": False,
        }
    if awp:
        method = {"name": "awp", "base": method, "gamma": 0.005, "warm_up_steps": _WARM_UP_STEPS}
    adversary = {"num_steps": 10, "step_size": "2/255", "random_start": "gaussian"}
    return {**method, **adversary, **({} if base == "at" else {"beta": 6.0})}


_PUBLISHED = {
    "trades": ("rat_table_7", "TRADES", ("clean", "rays_acc", "adbd")),
    "at": ("rat_table_8", "AT", ("clean", "pgd20", "cw20", "autoattack")),
}
_BASE_TITLES = {"at": "AT", "trades": "TRADES", "trades_awp": "TRADES + AWP"}


def experiments() -> Iterator[ExperimentEntry]:
    """Yields what is known of every experiment of this file."""
    rows = [("cifar10", "preact-resnet-18", base) for base in ("trades", "at", "trades_awp")]
    rows += [("cifar10", network, "trades") for network in NETWORKS if network[:6] != "preact"]
    rows += [("cifar100", "preact-resnet-18", "trades")]
    for row in rows:
        for terms in TERMS:
            yield _entry(*row, terms)


def _entry(data: str, network: str, base: str, terms: str) -> ExperimentEntry:
    has_terms = terms == "1st_2nd"
    title = _BASE_TITLES[base] + (" + 1st + 2nd" if has_terms else "")
    source, published, notes = _source(data, network, base, has_terms)
    is_baseline = "" if has_terms or base == "trades_awp" else ", its baseline"
    return ExperimentEntry(
        _name(data, network, base, terms),
        "rat",
        f"{data},{network},{base},{terms}",
        f"{data.replace('cifar', 'CIFAR-')}, {NETWORKS[network][1]}, {title}: "
        f"{source}{is_baseline}.",
        published,
        "not stated in the paper.",
        notes,
    )


def _source(data: str, network: str, base: str, has_terms: bool):
    """Where the experiment comes from, what is published of it, and what to note."""
    nothing = "no numbers in the supplement."
    if data == "cifar100":
        share = (
            "The wrong classes share 0.98 of a soft label: `1 - 2 / classes`, as for every number",
            "of classes.",
        )
        return "RAT's setting for 100 classes", nothing, share if has_terms else ()
    if base == "trades_awp":
        source = "the AWP variant of RAT's released code" + ("" if has_terms else ", without terms")
        steps = "Perturbed from the eleventh epoch on; the number of steps assumes batches of 128."
        return source, nothing, (steps,)
    if network != "preact-resnet-18":
        return "a network that RAT's supplement names", nothing, ()
    table, row, columns = _PUBLISHED[base]
    numbers = papers.quoted(table, row + ("+1st+2nd" if has_terms else ""), *columns)
    notes: tuple[str, ...] = ()
    if base == "at" and has_terms:
        notes = (
            "The released code has no variant of adversarial training: settings of its TRADES "
            "variant.",
        )
    elif base == "at":
        notes = (
            "Settings of the released TRADES variant; the code of this baseline is not among it.",
        )
    return f"Table {table[-1]} of RAT's supplement", f"{numbers}.", notes
