"""What every key of a configuration means, one sentence each; the documentation shows them."""

MEANINGS = {
    "name": "Name of the experiment; the run folder is called after it.",
    "seed": "Seed of the weights, of the order of the data and of every random start.",
    "imports": "Modules with parts of your own; `--import` fills it in.",
    "data.name": "Data set by name, or the path of an .npz file or of a folder of images.",
    "data.data_dir": "Folder of prepared TFDS data sets; empty: TFDS's own.",
    "data.augmentation": "none, flip, crop-flip, resized-crop-flip; default: the data set's own.",
    "data.train_examples": "Only so many training images; 0: all.",
    "data.validation_examples": "Training images that are set aside for validation.",
    "data.test_examples": "Only so many test images; 0: all.",
    "data.test_fraction": "Share of each class to test on, where the data has no test set.",
    "data.synthetic": "Random images in the shape of the data set, to try a configuration out.",
    "network.name": "Name of the network.",
    "network.input_shape": "Height, width and channels.",
    "network.options": "Further arguments of the network.",
    "head.kind": "linear, he (scaled cosines) or m_he (scaled angles).",
    "head.num_classes": "Number of classes.",
    "head.scale": "Scale s of an HE head.",
    "head.margin": "Margin m of an HE head, in the training loss only.",
    "head.feature_norm": "Whether an HE head normalises the features (FN).",
    "head.weight_norm": "Whether an HE head normalises the class weights (WN).",
    "threat.norm": "linf, l2 or l1.",
    "threat.epsilon": "Radius, for pixels from 0 to 1; a number or a fraction such as 8/255.",
    "objective.name": "Name of the objective; all other keys of the section are its arguments.",
    "optimizer.name": "sgd or adam.",
    "optimizer.learning_rate": "Highest learning rate of the schedule.",
    "optimizer.momentum": "Momentum of SGD; beta_1 of Adam.",
    "optimizer.weight_decay": "Weight decay, coupled as in PyTorch; 0 for Adam.",
    "schedule.name": "Schedule of the learning rate; all other keys here are its options.",
    "epsilon_schedule.name": "Schedule of the radius in training; empty: none.",
    "train.epochs": "Number of epochs.",
    "train.batch_size": "Images of one update, over all devices together.",
    "train.dtype": "float32, mixed_bfloat16 or mixed_float16.",
    "train.checkpoint_every_batches": "Batches from one checkpoint to the next; 0: by time only.",
    "train.checkpoint_every_seconds": "Seconds from one checkpoint to the next.",
    "train.overfitting_guard": "Whether to watch for catastrophic overfitting.",
    "train.guard_on_collapse": "What the guard does: stop, recover or monitor.",
    "train.guard_max_drop": "Largest fall of robust accuracy that the guard tolerates.",
    "train.guard_every_batches": "Batches from one look to the next; 0: after every epoch.",
    "train.cycle_ends": "Epochs after which the learning rate and the radius start again.",
    "train.snapshots": "Whether to keep the model at the end of every cycle.",
    "train.weight_averaging.kind": "ema, swa or empty: no averaged weights.",
    "train.weight_averaging.decay": "Share of the old average that a batch keeps (ema).",
    "train.weight_averaging.start_epoch": "First epoch that counts, from 0.",
    "train.weight_averaging.warm_up": "Whether the decay is smaller at first (ema).",
    "train.weight_averaging.batch_norm_batches": "Batches that measure the batch-norm statistics "
    "of the averaged weights; 0: the model's own statistics.",
    "evaluation.validation_attack": "Attack after every epoch; default: PGD-20 on the margin; "
    "empty: none.",
    "evaluation.attacks": "Attacks of `he-keras evaluate --run`.",
    "evaluation.step_size": "Step size of these attacks; empty: their own.",
    "evaluation.mode": "individual: every attack on every image; survivors: on what is left.",
    "evaluation.batch_size": "Images per batch of the evaluation.",
    "smoke.network": "Network of `--smoke`; empty: the same.",
    "smoke.options": "Further arguments of that network.",
    "smoke.input_shape": "Its height, width and channels.",
}


def flat(config, prefix: str = "") -> dict:
    """Returns the value of every key, by its full name.

    Example:
        >>> from he_keras.experiment.keys import flat
        >>> flat({"head": {"kind": "he", "options": {}}})
        {'head.kind': 'he', 'head.options': {}}
    """
    found: dict = {}
    for key, value in config.items():
        if hasattr(value, "items") and len(value):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = dict(value) if hasattr(value, "items") else value
    return found
