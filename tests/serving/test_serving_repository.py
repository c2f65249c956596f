"""Which version is in service as a folder changes; loading itself is replaced."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from served_models import PixelModel

from he_keras.serving import repository, servable
from he_keras.serving.metrics import Metrics
from he_keras.serving.request_error import RequestError


class FakeServable:
    def __init__(self, name, version, folder):
        self.name, self.version, self.num_users = name, version, 0
        self.itself = self
        content = (folder / "saved_model.pb").read_text()
        FakeServable.tried.append((version, content))
        if content == "broken":
            raise OSError("cannot read\nthis file")

    def warm_up(self, max_batch_size):
        if max_batch_size == 13:
            raise ValueError("zeros mean nothing to it")


@pytest.fixture
def model(monkeypatch, tmp_path):
    FakeServable.tried = []
    monkeypatch.setattr(repository, "Servable", FakeServable)
    yield repository.Model("digits", tmp_path, 8, Metrics())
    gc.unfreeze()


def write(folder, name, content="good"):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "saved_model.pb").write_text(content)


def states(model):
    answer = model.status(None)["model_version_status"]
    return {int(each["version"]): each["state"] for each in answer}


def test_the_newest_version_is_served_and_others_are_not_looked_at(model, tmp_path):
    for name in ("1", "2", "10", ".partial-11", "partial-12", "13.tmp", "x", "\u0661\u0664"):
        write(tmp_path, name)
    (tmp_path / "15").write_text("a file")
    model.refresh()
    assert model.current.version == 10
    assert FakeServable.tried == [(10, "good")]
    assert states(model) == {10: "AVAILABLE"}
    assert model.servable(None) is model.servable(10) is model.current
    for version in (1, 2, 11):
        with pytest.raises(RequestError, match=rf"Specific\(digits, {version}\)") as caught:
            model.servable(version)
        assert caught.value.status == 404


def test_a_new_version_takes_over_and_the_old_waits_for_its_requests(model, tmp_path):
    write(tmp_path, "1")
    model.refresh()
    old = model.current
    old.num_users = 1
    write(tmp_path, "2")
    model.refresh()
    assert model.current.version == 2
    assert states(model) == {1: "UNLOADING", 2: "AVAILABLE"}
    old.num_users = 0
    # As `Repository.load` leaves it.
    gc.freeze()
    gone = weakref.ref(old)
    del old
    model.refresh()
    assert states(model) == {1: "END", 2: "AVAILABLE"}
    assert gone() is None


@pytest.mark.slow
def test_a_broken_version_is_reported_and_not_tried_until_it_changes(model, tmp_path):
    write(tmp_path, "1")
    model.refresh()
    write(tmp_path, "2", "broken")
    model.refresh()
    model.refresh()
    assert model.current.version == 1
    assert FakeServable.tried[1:] == [(2, "broken")]
    status = model.status(2)["model_version_status"][0]
    assert status["state"] == "END"
    assert status["status"] == {"error_code": "UNKNOWN", "error_message": "cannot read this file"}
    write(tmp_path, "2", "repaired")
    model.refresh()
    assert model.current.version == 2
    assert states(model)[1] == "END"


def test_the_newest_that_loads_is_served_from_the_start(model, tmp_path):
    write(tmp_path, "1")
    write(tmp_path, "2", "broken")
    model.refresh()
    assert states(model) == {1: "AVAILABLE", 2: "END"}


@pytest.mark.slow
def test_taking_a_version_away_goes_back_to_the_one_before(model, tmp_path):
    write(tmp_path, "1")
    write(tmp_path, "2")
    model.refresh()
    (tmp_path / "2").rename(tmp_path / ".2")
    model.refresh()
    assert states(model) == {1: "AVAILABLE"}
    (tmp_path / "1").rename(tmp_path / ".1")
    model.refresh()
    assert model.current.version == 1, "the last one stays"


@pytest.mark.slow
def test_a_version_that_is_back_stays_available_when_its_first_copy_goes(model, tmp_path):
    write(tmp_path, "1")
    model.refresh()
    first = model.current
    first.num_users = 1
    write(tmp_path, "2")
    model.refresh()
    (tmp_path / "2").rename(tmp_path / ".2")
    model.refresh()
    first.num_users = 0
    model.refresh()
    assert model.current.version == 1 and model.current is not first
    assert states(model) == {1: "AVAILABLE"}


def test_a_model_that_cannot_be_warmed_up_is_served(monkeypatch, tmp_path, caplog):
    FakeServable.tried = []
    monkeypatch.setattr(repository, "Servable", FakeServable)
    write(tmp_path, "1")
    model = repository.Model("digits", tmp_path, 13, Metrics())
    model.refresh()
    assert model.current.version == 1
    assert "Cannot warm up version 1 of digits" in caplog.text


@pytest.mark.slow
def test_several_models_and_what_is_wrong_with_them(monkeypatch, tmp_path):
    FakeServable.tried = []
    monkeypatch.setattr(repository, "Servable", FakeServable)
    folders = {name: tmp_path / name for name in ("a", "b")}
    for folder in folders.values():
        folder.mkdir()
    write(folders["a"], "1")
    models = repository.Repository(folders, 8, Metrics())
    with pytest.raises(ValueError, match="expected a version of b that loads; received none"):
        models.load()
    assert not models.is_complete
    write(folders["b"], "3", "broken")
    with pytest.raises(ValueError, match="3: cannot read this file"):
        models.load()
    write(folders["b"], "2")
    models.load()
    models.stop()
    assert models.versions() == {"a": 1, "b": 2} and models.is_complete
    assert "a" in models and "c" not in models
    with pytest.raises(RequestError, match=r"Latest\(c\)"):
        models.model("c")


def test_a_saved_model_is_run_described_and_warmed_up(tmp_path):
    module = PixelModel(2.0)
    signatures = {"serving_default": module.integers, "scalar": module.scalar}
    tf.saved_model.save(module, str(tmp_path / "1"), signatures=signatures)
    loaded = servable.Servable("pixels", 1, tmp_path / "1")
    loaded.warm_up(4)
    signature = loaded.signature("serving_default")
    assert signature.is_batched and not loaded.signature("scalar").is_batched
    images = np.full((3, 2, 3, 1), 255, np.uint8)
    outputs = signature.run({"images": images})
    np.testing.assert_allclose(outputs["logits"], np.full((3, 3), 2.0))
    assert outputs["labels"].tolist() == [b"cat"] * 3
    described = loaded.signature_definitions["serving_default"]["inputs"]["images"]
    assert described["dtype"] == "DT_UINT8"
    assert [each["size"] for each in described["tensor_shape"]["dim"]] == ["-1", "2", "3", "1"]
    with pytest.raises(RequestError, match="'other' not found in signature def"):
        loaded.signature("other")
    with loaded.in_use(), loaded.in_use():
        assert loaded.num_users == 2
    assert loaded.num_users == 0


def test_a_saved_model_without_signatures_is_refused(tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path / "1"))
    with pytest.raises(ValueError, match="expected a SavedModel with signatures"):
        servable.Servable("empty", 1, tmp_path / "1")


def test_a_fixed_batch_size_is_no_batch_to_share(tmp_path):
    module = tf.Module()
    function = tf.function(lambda x: {"y": x}, [tf.TensorSpec([2], tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path / "1"), signatures={"serving_default": function})
    signature = servable.Servable("pair", 1, tmp_path / "1").signature("serving_default")
    assert not signature.is_batched and signature.example(8) is None


def test_no_batch_size_traces_a_loaded_signature_again(tmp_path):
    module = PixelModel(2.0)
    tf.saved_model.save(module, str(tmp_path / "1"), signatures={"serving_default": module.half})
    signature = servable.Servable("pixels", 1, tmp_path / "1").signature("serving_default")
    before = len(traced_functions())
    for size in range(1, 9):
        signature.run({"x": np.ones(size, np.float32)})
    assert len(traced_functions()) == before


def traced_functions():
    from tensorflow.python.eager import context

    return context.context().list_function_names()
