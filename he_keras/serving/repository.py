"""The served models: of each, the newest version in its folder that loads."""

import gc
import logging
import pathlib
import threading
from typing import NamedTuple

from he_keras.serving.request_error import RequestError
from he_keras.serving.servable import Servable

_LOGGER = logging.getLogger("he_keras.serving")


class VersionStatus(NamedTuple):
    """What the status API says about a version, in the terms of TensorFlow Serving.

    Attributes:
        state: LOADING, AVAILABLE, UNLOADING or END.
        error: why the version could not be loaded; otherwise empty.
        fingerprint: names, sizes and times of the files of a version that could not be loaded.
    """

    state: str
    error: str = ""
    fingerprint: tuple = ()


class Model:
    """One served folder.

    Args:
        name: its name in the URLs.
        folder: the folder of the versions, each in a sub-folder whose name is a number.
        max_batch_size: the largest batch to warm up with.
        metrics: records loads and failures.

    Attributes:
        name: its name in the URLs.
    """

    def __init__(self, name: str, folder: pathlib.Path, max_batch_size: int, metrics):
        self.name = name
        self._folder = folder
        self._max_batch_size = max_batch_size
        self._metrics = metrics
        self._lock = threading.Lock()
        self._current: Servable | None = None
        self._retired: list[Servable] = []
        self._statuses: dict[int, VersionStatus] = {}

    @property
    def current(self) -> Servable | None:
        """The version in service."""
        return self._current

    def servable(self, version: int | None) -> Servable:
        """Returns the version in service.

        Raises:
            RequestError: 404 if another version is asked for, or if none is in service.
        """
        current = self._current
        if current is None or version not in (None, current.version):
            asked = (
                f"Latest({self.name})" if version is None else f"Specific({self.name}, {version})"
            )
            raise RequestError(404, f"Servable not found for request: {asked}")
        return current

    def status(self, version: int | None) -> dict:
        """Returns the answer of the status API.

        Raises:
            RequestError: 404 if this version was never seen.
        """
        with self._lock:
            known = dict(self._statuses)
        if version is not None and version not in known:
            raise RequestError(404, f"Could not find version {version} of model {self.name}")
        return {
            "model_version_status": [
                {
                    "version": str(number),
                    "state": status.state,
                    "status": {
                        "error_code": "UNKNOWN" if status.error else "OK",
                        "error_message": status.error,
                    },
                }
                for number, status in sorted(known.items(), reverse=True)
                if version in (None, number)
            ]
        }

    def refresh(self) -> None:
        """Puts the newest version that loads into service, and frees those no longer in use.

        A version that failed is tried again only after one of its files has changed.
        """
        folders = self._version_folders()
        for version in sorted(folders, reverse=True):
            if self._current is not None and version == self._current.version:
                break
            fingerprint = _fingerprint(folders[version])
            known = self._statuses.get(version)
            if known and known.error and known.fingerprint == fingerprint:
                continue
            if self._load(version, folders[version], fingerprint):
                break
        self._free_unused()
        self._forget(set(folders))

    def _version_folders(self) -> dict[int, pathlib.Path]:
        """The folders of versions. Half-written ones do not count: their names are no numbers."""
        try:
            return {
                int(each.name): each
                for each in self._folder.iterdir()
                if each.name.isascii() and each.name.isdecimal() and each.is_dir()
            }
        except OSError as error:
            _LOGGER.warning("Cannot read %s: %s", self._folder, error)
            return {}

    def _load(self, version: int, folder: pathlib.Path, fingerprint: tuple) -> bool:
        self._set_status(version, VersionStatus("LOADING"))
        try:
            servable = Servable(self.name, version, folder)
        # A damaged SavedModel can raise any kind of error.
        except Exception as error:
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            self._set_status(version, VersionStatus("END", reason, fingerprint))
            self._metrics.count_load(self.name, "failed")
            _LOGGER.error("Cannot load version %d of %s: %s", version, self.name, reason)
            return False
        try:
            servable.warm_up(self._max_batch_size)
        # Zeros may be no valid input of this model, so a failure proves nothing.
        except Exception as error:
            _LOGGER.warning("Cannot warm up version %d of %s: %s", version, self.name, error)
        if self._current is not None:
            self._retired.append(self._current)
            self._set_status(self._current.version, VersionStatus("UNLOADING"))
        self._current = servable
        self._set_status(version, VersionStatus("AVAILABLE"))
        self._metrics.count_load(self.name, "loaded")
        self._metrics.set_version(self.name, version)
        _LOGGER.info("Serving version %d of %s", version, self.name)
        return True

    def _free_unused(self) -> None:
        num_retired = len(self._retired)
        self._retired = [each for each in self._retired if self._keep(each)]
        freed = num_retired - len(self._retired)
        if freed:
            # A loaded SavedModel refers to itself, so only a collection frees it.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            _LOGGER.info("Unloaded %d old version(s) of %s", freed, self.name)

    def _keep(self, retired: Servable) -> bool:
        in_use = bool(retired.num_users)
        # The same version may be in service again, newly loaded.
        if not in_use and self._current is not None and self._current.version != retired.version:
            self._set_status(retired.version, VersionStatus("END"))
        return in_use

    def _forget(self, present: set[int]) -> None:
        """Forgets versions whose folders have been removed."""
        with self._lock:
            self._statuses = {
                version: status
                for version, status in self._statuses.items()
                if version in present or status.state != "END"
            }

    def _set_status(self, version: int, status: VersionStatus) -> None:
        with self._lock:
            self._statuses[version] = status


def _fingerprint(folder: pathlib.Path) -> tuple:
    try:
        files = [(str(path), path.stat()) for path in sorted(folder.rglob("*"))]
    except OSError as error:
        return (str(error),)
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in files)


class Repository:
    """The served models. A thread of its own looks for new versions.

    Args:
        models: the folder of each model, by the model's name.
        max_batch_size: the largest batch to warm up with.
        metrics: records loads and failures.
    """

    def __init__(self, models: dict[str, pathlib.Path], max_batch_size: int, metrics):
        self._models = {
            name: Model(name, folder, max_batch_size, metrics) for name, folder in models.items()
        }
        self._stopping = threading.Event()
        self._poller: threading.Thread | None = None
        self._failures: dict[str, str] = {}

    def load(self) -> None:
        """Loads the newest version of every model.

        Raises:
            ValueError: No version of a model loads.
        """
        for model in self._models.values():
            model.refresh()
            if model.current is None:
                statuses = model.status(None)["model_version_status"]
                reasons = [
                    f"{each['version']}: {each['status']['error_message']}" for each in statuses
                ]
                raise ValueError(
                    f"No model to serve; expected a version of {model.name} that loads; "
                    f"received {'; '.join(reasons) or 'none'}"
                )
        # TensorFlow has hundreds of thousands of objects. Without this, every collection that a
        # large request causes would look at each of them.
        gc.collect()
        gc.freeze()

    def start_polling(self, poll_seconds: float) -> None:
        """Looks for new versions every `poll_seconds`, until `stop` is called."""

        def poll() -> None:
            while not self._stopping.wait(poll_seconds):
                for model in self._models.values():
                    self._refresh(model)

        self._poller = threading.Thread(target=poll, name="he-keras-versions", daemon=True)
        self._poller.start()

    def _refresh(self, model: Model) -> None:
        """Refreshes one model. An error is logged once, and the model is tried again later."""
        try:
            model.refresh()
        # An unforeseen error must not keep other models or the next version from loading.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if self._failures.get(model.name) != reason:
                _LOGGER.exception("Cannot look for versions of %s; trying again", model.name)
            self._failures[model.name] = reason
        else:
            self._failures.pop(model.name, None)

    def stop(self) -> None:
        """Stops looking for versions. It does not wait for one that is being loaded."""
        self._stopping.set()
        gc.unfreeze()

    def model(self, name: str) -> Model:
        """Returns a model.

        Raises:
            RequestError: 404 if there is no model of that name.
        """
        if name not in self._models:
            raise RequestError(404, f"Servable not found for request: Latest({name[:80]})")
        return self._models[name]

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def versions(self) -> dict[str, int]:
        """Returns the version in service of each model that has one."""
        loaded = {name: model.current for name, model in self._models.items()}
        return {name: each.version for name, each in loaded.items() if each is not None}

    @property
    def is_complete(self) -> bool:
        """Whether every model has a version in service."""
        return len(self.versions()) == len(self._models)
