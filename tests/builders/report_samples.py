"""Writes report folders as an evaluation leaves them, with simulated numbers."""

import json
import pathlib

import numpy as np

ATTACKS = ("fgsm", "pgd-20", "cw-linf-20", "autoattack")
STAGES = ("apgd-ce-100", "apgd-t-100", "fab-t-100", "square-5000")
CORRUPTIONS = ("gaussian_noise", "shot_noise", "motion_blur", "frost", "contrast", "jpeg")
CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CHECKS = (
    ("clean-accuracy", "before", "pass", "84.0%", "Clean accuracy is far above chance."),
    ("logits-not-probabilities", "before", "pass", "rows sum to -3.1", "Outputs are logits."),
    ("zero-gradients", "before", "warn", "3.5% of examples", "Some gradients vanish: use DLR."),
    (
        "rescale-invariance",
        "after",
        "fail",
        "7.3 points",
        "Cross-entropy saturates: do not use it.",
    ),
    ("batch-independence", "before", "pass", "2.4e-07", "Logits do not depend on the batch."),
    ("active-test", "after", "skipped", "not run", "Only for heads that are linear layers."),
)


def write_sample(
    folder,
    num_examples=200,
    num_classes=10,
    image_shape=(32, 32, 3),
    mode="survivors",
    optional=True,
    seed=0,
    strength=0.45,
    **changes,
):
    """Writes report.json, per_example.npz and gallery.npz, and returns the folder.

    Args:
        folder: where to write; created.
        num_examples: examples of the evaluation.
        num_classes: their classes.
        image_shape: shape of the pictures in the gallery.
        mode: "survivors" or "individual".
        optional: write all the sections that a report may lack, or none.
        seed: of the verdicts; the labels are the same for every seed.
        strength: share of the examples that the strongest attack breaks.
        **changes: entries of the report that replace the simulated ones.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    per_example = simulate(num_examples, num_classes, mode, seed, strength)
    report = _required(per_example, mode, num_classes)
    gallery = _gallery(per_example) if optional else []
    if optional:
        report |= _optional(num_examples)
    else:
        report |= dict.fromkeys(("command", "protocol", "he_panel", "epsilon_curve"))
        report |= dict.fromkeys(("corruptions", "transfer"))
        report |= {"checks": [], "class_names": [], "environment": {}, "settings": {}}
    report |= {"gallery": gallery, **changes}
    (folder / "report.json").write_text(json.dumps(report))
    np.savez(folder / "per_example.npz", **per_example)
    if report["gallery"]:
        pictures = draw(len(report["gallery"]), image_shape)
        np.savez(folder / "gallery.npz", **pictures)
    return folder


def simulate(num_examples, num_classes, mode, seed, strength):
    """Draws verdicts in which later attacks are stronger."""
    labels = np.random.default_rng(77).integers(0, num_classes, num_examples)
    random = np.random.default_rng(seed)
    clean = random.random(num_examples) < 0.84
    other = (labels + random.integers(1, max(num_classes, 2), num_examples)) % num_classes
    resistance = random.random(num_examples)
    arrays, broken_by = {}, np.where(clean, -1, -2)
    unbroken = clean.copy()
    for number, name in enumerate(ATTACKS):
        share = strength * (0.55 + 0.15 * number)
        holds = clean & (resistance + 0.08 * random.standard_normal(num_examples) > share)
        broken_by[unbroken & ~holds] = number
        unbroken &= holds
        arrays[name] = unbroken.copy() if mode == "survivors" else holds
    distance = np.where(broken_by >= 0, (8 / 255) * random.random(num_examples), 0.0)
    return {
        "labels": labels,
        "clean": clean,
        "clean_prediction": np.where(clean, labels, other),
        "adversarial_prediction": np.where(unbroken, labels, other),
        "broken_by": broken_by,
        "margin": np.where(unbroken, 1.0, -1.0) * random.random(num_examples),
        "distance": distance.astype(np.float32),
        **arrays,
    }


def wilson(share, size):
    """A 95% interval."""
    z = 1.96
    middle = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * np.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return [max(0.0, float(middle - half)), min(1.0, float(middle + half))]


def _required(per_example, mode, num_classes):
    clean, broken_by = per_example["clean"], per_example["broken_by"]
    size = len(clean)
    worst = float((broken_by == -1).mean())
    confusion = np.zeros((num_classes, num_classes), int)
    broken = broken_by >= 0
    pairs = per_example["labels"][broken], per_example["adversarial_prediction"][broken]
    np.add.at(confusion, pairs, 1)
    return {
        "schema_version": 1,
        "title": "PGD-AT+HE on CIFAR-10",
        "created": "2026-11-18T14:56:25+00:00",
        "mode": mode,
        "num_examples": size,
        "clean_accuracy": float(clean.mean()),
        "clean_interval": wilson(float(clean.mean()), size),
        "worst_case": worst,
        "worst_case_interval": wilson(worst, size),
        "threat": {"norm": "linf", "epsilon": 8 / 255, "bounds": [0, 1]},
        "attacks": [_attack(number, per_example) for number in range(len(ATTACKS))],
        "confusion": confusion.tolist(),
    }


def _attack(number, per_example):
    name, broken_by = ATTACKS[number], per_example["broken_by"]
    size = len(broken_by)
    mine = broken_by == number
    accuracy = float(per_example[name].mean())
    distances = per_example["distance"][mine]
    remaining = (broken_by == -1) | (broken_by > number)
    entry = {
        "name": name,
        "robust_accuracy": accuracy,
        "interval": wilson(accuracy, size),
        "num_attacked": int(((broken_by == -1) | (broken_by >= number)).sum()),
        "num_broken": int(mine.sum()),
        "remaining": float(remaining.mean()),
        "seconds": 4.2 * 9**number,
        "forward_passes": 2.0 * 11.3**number,
        "backward_passes": 1.0 * 10.7**number,
        "median_distance": float(np.median(distances)) if mine.any() else None,
        "max_distance": float(distances.max()) if mine.any() else None,
        "settings": {"num_steps": 20, "seed": 0, "batch_size": 250},
        "stages": [],
        "warnings": [],
        "note": "",
    }
    if name == "pgd-20":
        entry["settings"]["logit_scale"] = "unit"
        entry["note"] = "Cross-entropy at scale 1, as in the paper: see the panel on the head."
    if name == "autoattack":
        entry["stages"] = [_stage(entry, part) for part in range(len(STAGES))]
        entry["warnings"] = ["Square broke 0.4% more than the white-box attacks left."]
    return entry


def _stage(whole, part):
    stage = dict(whole, name=STAGES[part], stages=[], warnings=[], note="")
    stage["robust_accuracy"] = whole["robust_accuracy"] + 0.004 * (len(STAGES) - 1 - part)
    stage["remaining"] = stage["robust_accuracy"]
    return stage | {"num_broken": 0, "median_distance": None, "max_distance": None}


def _optional(num_examples):
    return {
        "command": "python tools/evaluate.py --run=runs/he --attacks=fgsm,pgd-20,autoattack",
        "protocol": None,
        "he_panel": _panel(num_examples),
        "checks": [
            dict(zip(("name", "when", "verdict", "figure", "message"), check, strict=True))
            for check in CHECKS
        ],
        "epsilon_curve": {
            "attack": "cw-linf-20",
            "num_examples": num_examples,
            "points": [
                {"epsilon": k / 255, "accuracy": 0.84 * float(np.exp(-((k / 10) ** 2)))}
                for k in (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
            ],
        },
        "class_names": list(CLASSES),
        "corruptions": _corruptions(num_examples),
        "transfer": {
            "attack": "mim-20",
            "names": ["PGD-AT", "PGD-AT+HE", "TRADES"],
            "robust_accuracy": [[0.51, 0.63, 0.66], [0.62, 0.54, 0.64], [0.63, 0.61, 0.55]],
            "num_examples": num_examples,
        },
        "environment": {
            "he_keras": "0.1.0",
            "keras": "3.15.1",
            "devices": ["/physical_device:CPU:0"],
            "commit": "8697900c0ffee",
        },
        "settings": {"batch_size": 250, "data": {"name": "cifar10", "split": "test"}},
    }


def _panel(num_examples):
    rows = (
        ("PGD-20, scale 1", "Cross-entropy on bare cosines: the paper's protocol.", 0.62),
        ("PGD-20, model's scale", "Cross-entropy on the logits that the model returns.", 0.57),
        ("Adaptive PGD-20", "Cross-entropy with the head's scale and margin.", 0.566),
        ("Margin PGD-20", "The difference of two logits: no scale can hide it.", 0.541),
        ("AutoAttack", "The standard ensemble.", 0.528),
    )
    names = ("name", "meaning", "robust_accuracy", "interval")
    return {
        "num_examples": num_examples,
        "rows": [
            dict(zip(names, (*row, wilson(row[-1], num_examples)), strict=True)) for row in rows
        ],
    }


def _corruptions(num_images):
    random = np.random.default_rng(5)
    return {
        "source": "generated by he_keras; frost textures synthesised",
        "num_images": num_images,
        "mean_corruption_accuracy": 0.655,
        "accuracy": {
            name: [round(0.84 - 0.5 * random.random() * k / 4, 4) for k in range(5)]
            for name in CORRUPTIONS
        },
    }


def _gallery(per_example, each=6):
    broken = np.flatnonzero(per_example["broken_by"] >= 0)
    held = np.flatnonzero(per_example["broken_by"] == -1)
    margin = per_example["margin"]
    hardest = broken[np.argsort(margin[broken])][:each]
    easiest = held[np.argsort(-margin[held])][:each]
    return [
        {
            "position": int(position),
            "label": int(per_example["labels"][position]),
            "clean_prediction": int(per_example["clean_prediction"][position]),
            "adversarial_prediction": int(per_example["adversarial_prediction"][position]),
            "kind": kind,
            "broken_by": ATTACKS[per_example["broken_by"][position]] if kind == "hardest" else None,
            "distance": float(per_example["distance"][position]),
            "margin": float(margin[position]),
        }
        for kind, positions in (("hardest", hardest), ("easiest", easiest))
        for position in positions
    ]


def draw(count, shape, epsilon=8 / 255, seed=3):
    """Pictures of coloured shapes with grain, and the same with noise of the given size."""
    random = np.random.default_rng(seed)
    height, width, channels = shape
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pictures = []
    for _ in range(count):
        ground, colour = random.random((2, channels))
        centre, radius = 0.3 + 0.4 * random.random(2), 0.15 + 0.2 * random.random()
        inside = ((y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2)[..., None]
        picture = np.where(inside, colour, ground * (0.5 + 0.5 * y[..., None]))
        pictures.append(picture + 0.03 * random.standard_normal(shape))
    clean = np.clip(pictures, 0, 1).astype(np.float32)
    noise = epsilon * np.sign(random.standard_normal(clean.shape))
    return {"clean": clean, "adversarial": np.clip(clean + noise, 0, 1).astype(np.float32)}
