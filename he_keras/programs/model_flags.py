"""Which data and which threat model a program takes: the flags, the run's, or the model file's."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from absl import flags

#: So many clean images at most, of so many bytes, tell what a classifier returns and takes.
_TRIED_EXAMPLES, _TRIED_BYTES = 500, 2**27

DATA = flags.DEFINE_string("data", None, "Data set name or path; default: the run's own.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_NORM = flags.DEFINE_enum("norm", None, ["linf", "l2", "l1"], "Default: the run's own.")
_EPSILON = flags.DEFINE_string("epsilon", None, "Radius, a number or a fraction such as 8/255.")
_BOUNDS = flags.DEFINE_list(
    "bounds", None, "LOW,HIGH: pixel values of a model that does not know them, such as 0,255."
)
_OUTPUTS = flags.DEFINE_enum(
    "outputs",
    "auto",
    ["auto", "logits", "probabilities"],
    "What an ordinary Keras classifier returns; auto: found out on clean images.",
)
_PIXELS = flags.DEFINE_enum(
    "pixels",
    "auto",
    ["auto", "0..1", "0..255"],
    "The pixels that an ordinary Keras classifier takes; auto: found out on clean images.",
)
#: The flags that a protocol replaces.
THREAT_FLAGS = (_NORM, _EPSILON, _BOUNDS)


def override_data(config) -> None:
    """Puts --data and --data_dir into a configuration, if they are given."""
    with config.unlocked():
        if DATA.value:
            if DATA.value != config.data.name:  # another source has no split of this run
                config.data.test_fraction = 0.0
            config.data.update({"name": DATA.value, "synthetic": False, "test_examples": 0})
        config.data.data_dir = DATA_DIR.value or config.data.data_dir


def threat_of(config, models: Iterable, is_run: bool):
    """Returns the threat model that the flags and these models give; see `chosen_threat`."""
    return chosen_threat(config, models, is_run, _NORM.value, _EPSILON.value, _BOUNDS.value)


def pixels_of(models: Iterable) -> tuple[float, float]:
    """Returns the bounds of the images that all the models take, --bounds considered."""
    return _pixels(list(models), _BOUNDS.value)


def chosen_threat(config, models: Iterable, is_run: bool, norm=None, epsilon=None, bounds=None):
    """Returns the threat model, which `config` then names too, and what to print about it.

    Args:
        config: the run's configuration, or the default one.
        models: the models to attack; what they were trained with counts where there is no run.
        is_run: whether the configuration is that of a run.
        norm: the flag, or None.
        epsilon: the flag, or None.
        bounds: the flag, two texts, or None: for models that do not know their pixel values.
    """
    from he_keras.threat import UNIT_BOUNDS, ThreatModel, trained_threat

    models = list(models)
    known = _pixels(models, bounds)
    trained = list(dict.fromkeys(filter(None, map(trained_threat, models))))
    own_norm, own_epsilon = config.threat.norm, config.threat.epsilon
    if trained and not is_run:
        own_norm, own_epsilon = trained[0].norm, trained[0].epsilon
    is_stored = bool(trained or is_run)
    if not epsilon:
        if len(trained) > 1 and not is_run:
            raise ValueError(
                "The models were trained with different threat models; expected --norm and "
                f"--epsilon; received {' and '.join(each.text() for each in trained)}"
            )
        if norm not in (None, own_norm) or not (is_stored or known == UNIT_BOUNDS):
            raise ValueError(
                "A radius belongs to one norm and one range of pixels; expected --epsilon with "
                f"--norm and --bounds; received norm={norm or own_norm} and bounds={known} alone"
            )
    threat = ThreatModel(norm or own_norm, epsilon or own_epsilon, known)
    with config.unlocked():
        config.threat.update({"norm": threat.norm, "epsilon": str(epsilon or own_epsilon)})
    others = [each.text() for each in trained if each != threat]
    if others:
        return threat, f"Trained at {' and at '.join(others)}; attacked at {threat.text()}."
    if not (is_stored or epsilon):
        return threat, f"The model names no threat model: attacked at {threat.text()}."
    return threat, ""


def _pixels(models: list, bounds) -> tuple[float, float]:
    """The bounds of the images that all the models take."""
    from he_keras.threat import bounds_of

    try:
        given = None if bounds is None else tuple(float(bound) for bound in bounds)
    except ValueError:
        raise ValueError(
            f"Invalid --bounds; expected LOW,HIGH such as 0,255; received {','.join(bounds)}"
        ) from None
    known = {bounds_of(model, given) for model in models}
    if len(known) > 1:
        raise ValueError(
            f"The models take different pixel values; expected one range; received {sorted(known)}"
        )
    return known.pop()


def as_classifier(model, dataset=None, name: str = "Model") -> tuple:
    """Returns a model that maps images in [0, 1] to logits, and what was done to an ordinary one.

    Of an ensemble, each member is made such a model.

    Args:
        model: what `load_classifier` returned.
        dataset: a data set, or two arrays of images in [0, 1] and labels. Without it, the first
            layers show the pixels of a model, or it takes [0, 1].
        name: what the text calls the model.
    """
    from he_keras import SnapshotEnsemble

    if isinstance(model, SnapshotEnsemble):
        return _as_ensemble(model, dataset)
    asked = [f"--{flag.name}={flag.value}" for flag in (_OUTPUTS, _PIXELS) if flag.value != "auto"]
    if asked and not _is_to_be_wrapped(model):
        other = "--bounds" if _BOUNDS.value else f"a {type(model).__name__}"
        raise ValueError(
            "--outputs and --pixels are for ordinary Keras classifiers in a .keras file; expected "
            f"no such flag; received {' '.join(asked)} with {other}"
        )
    return _wrapped(model, dataset, name) if _is_to_be_wrapped(model) else (model, "")


def prepare_substitutes(attacks: Iterable, dataset) -> list[str]:
    """Does to what transfer attacks have loaded what `as_classifier` does, and says so."""
    from he_keras.attacks import Transfer

    told = []
    for attack in attacks:
        if isinstance(attack, Transfer) and _is_to_be_wrapped(attack.substitute.model):
            model, done = _wrapped(attack.substitute.model, dataset, attack.name)
            attack.replace_substitute(model)
            told.append(done)
    return told


def _is_to_be_wrapped(model) -> bool:
    import keras

    from he_keras import classifiers

    is_ordinary = isinstance(model, keras.Model) and not classifiers.knows_its_images(model)
    return is_ordinary and not _BOUNDS.value


def _wrapped(model, dataset, name: str) -> tuple:
    from he_keras import classifiers

    images, labels = _some_examples(dataset) if dataset is not None else (None, None)
    found = classifiers.inspect(model, _OUTPUTS.value, _PIXELS.value, images, labels)
    if found.pixels is None and found.kind == "logits" and found.columns > 1:
        note = "nothing shows its pixels: taken as 0..1, --pixels says otherwise"
        found = dataclasses.replace(found, pixels="0..1", evidence=note)
    wrapped = classifiers.wrapped_as_found(model, found)
    return wrapped, f"{name}: {classifiers.remark(wrapped, found)}"


def _as_ensemble(ensemble, dataset) -> tuple:
    """An ensemble of what `as_classifier` makes of its members."""
    told: list[str] = []

    def prepare(member):
        place = ensemble.members.index(member) + 1
        classifier, done = as_classifier(member, dataset, f"Member {place}")
        told.extend([done] if done else [])
        return classifier

    return ensemble.with_members(prepare), "\n".join(told)


def _some_examples(dataset):
    """Examples from everywhere in a data set, which may be sorted by class."""
    from he_keras.data import eval_pipeline

    if isinstance(dataset, tuple):
        return tuple(column[:_TRIED_EXAMPLES] for column in dataset)
    height, width, channels = dataset.image_shape
    most = max(1, min(_TRIED_EXAMPLES, _TRIED_BYTES // (4 * height * width * channels)))
    rows = np.unique(np.linspace(0, len(dataset) - 1, most).round().astype(int))
    images, labels = next(eval_pipeline(dataset.subset(rows), len(rows)).as_numpy_iterator())
    return images, labels


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1)):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def check_distinct(paths: Sequence[str]) -> None:
    """Raises a ValueError where a model is given twice."""
    if len(set(paths)) != len(paths):
        raise ValueError(f"Models must differ; expected no path twice; received {list(paths)}")
