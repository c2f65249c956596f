"""Which data and which threat model a program takes: the flags, the run's, or the model file's."""

import pathlib
from collections.abc import Iterable, Sequence

from absl import flags

DATA = flags.DEFINE_string("data", None, "Data set name or path; default: the run's own.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_NORM = flags.DEFINE_string("norm", None, "linf, l2 or l1; default: the run's own.")
_EPSILON = flags.DEFINE_string("epsilon", None, "Radius, a number or a fraction such as 8/255.")
_BOUNDS = flags.DEFINE_list(
    "bounds", None, "LOW,HIGH: pixel values of a model that does not know them, such as 0,255."
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
                "A radius belongs to one norm and one range of pixels; expected --epsilon beside "
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
