"""Public checkpoints give the logits of the published code, in float32 and in float64."""

import pickle
import sys
import types

import keras
import numpy as np
import public_checkpoints
import pytest
from public_checkpoints import FOLDER, golden, jax_pair

import he_keras as he
from he_keras.zoo.tensor_files import write_safetensors, write_torch

_HALF = ((0.5,) * 3, (0.5,) * 3)
_RAW = {"options": {"shortcut": "input"}}
_MNIST = {
    "statistics": ((0.5,), (0.5,)),
    "input_shape": (28, 28, 1),
    "options": {"border": 2},
}
_IMAGENET = {"input_shape": (224, 224, 3)}
#: For each checkpoint its recipe, and what its names do not settle ("statistics": the golden's).
CASES = {
    "at_he_wrn_10_1": ("at_he", {}),
    "at_he_wrn_10_1_plain": ("at_he", {}),
    "at_he_wrn_16_2": ("at_he", {}),
    "dm_wrn_10_1_mnist": ("deepmind/wrn", _MNIST),
    "dm_wrn_10_1_relu": ("deepmind/wrn", {"options": {"activation": "relu"}}),
    "dm_wrn_10_1_swish": ("deepmind/wrn", {}),
    "dm_wrn_16_2_swish": ("deepmind/wrn", {}),
    "fast_preact18": ("fast_adversarial", {}),
    "madry_cifar_resnet18": ("madry", {}),
    "madry_cifar_resnet50": ("madry", {}),
    "madry_imagenet_resnet50": ("madry", _IMAGENET),
    "rb_andriushchenko2020_preact18": ("robustbench/preact", {"statistics": False, **_RAW}),
    "rb_boosting_wrn_10_1": ("robustbench/boosting", {}),
    "rb_hendrycks2019_wrn_10_1": ("robustbench/wrn", {"statistics": _HALF}),
    "rb_kireev2021_preact18": ("robustbench/preact", {}),
    "rb_resnet18": ("robustbench/resnet", {}),
    "rb_rice2020_cifar100_preact18": ("robustbench/preact", {"statistics": "golden"}),
    "rb_rice2020_l2_preact18": ("robustbench/preact", {}),
    "rb_rice2020_wrn_10_1": ("robustbench/wrn", {"statistics": "golden"}),
    "rb_wong2020_preact18": ("robustbench/preact", _RAW),
    "rb_wrn_10_1_nosub": ("robustbench/wrn", {}),
    "rb_wrn_10_1_sub": ("robustbench/wrn", {}),
    "rule_dm_preact18": ("deepmind/preact", {}),
    "rule_fast_preact18": ("fast_adversarial", {}),
    "rule_madry_imagenet_resnet50": ("madry", _IMAGENET),
    "trades_wrn_10_1": ("trades", {}),
}
#: One of each layout; the others vary options, and run with the slow tests.
FAST = ("at_he_wrn_10_1", "dm_wrn_10_1_swish", "madry_cifar_resnet18", "rb_wong2020_preact18")


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")


def test_every_stored_checkpoint_has_a_case():
    assert sorted(CASES) == public_checkpoints.names()


def loaded(name, tmp_path):
    stored = golden(name)
    recipe, changes = CASES[name]
    if changes.get("statistics") == "golden":
        changes = {**changes, "statistics": (stored.mean, stored.std)}
    return he.zoo.load(recipe, saved(stored.state, tmp_path), **changes), stored


def saved(state, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    write_safetensors(path, state)
    return path


def answers(model, images):
    """What the published code returns: of an HE head the cosines."""
    if isinstance(model, he.HEAdversarialModel):
        return np.asarray(model.cosines(images))
    return np.asarray(model(images, training=False))


@pytest.mark.parametrize("name", FAST)
def test_logits_are_those_of_the_published_code(name, tmp_path):
    model, stored = loaded(name, tmp_path)
    np.testing.assert_allclose(answers(model, stored.images), stored.logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_exact_in_float64(name, tmp_path, float64):
    model, stored = loaded(name, tmp_path)
    images = stored.images.astype("float64")
    np.testing.assert_allclose(answers(model, images), stored.logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name, file",
    [("madry_cifar_resnet18", None), ("at_he_wrn_10_1", "at_he_wrn_10_1_legacy_cuda.pt")],
)
def test_files_that_pytorch_wrote(name, file):
    stored = golden(name)
    model = he.zoo.load(CASES[name][0], FOLDER / (file or f"{name}.pt"))
    np.testing.assert_allclose(answers(model, stored.images), stored.logits, rtol=0, atol=1e-5)


class FlatMapping(dict):
    """Stands for Haiku's mapping of that name: a pickle calls it with a dictionary."""

    __module__ = "haiku._src.data_structures"

    def __reduce__(self):
        return FlatMapping, (dict(self),)


@pytest.mark.parametrize("mapping", [dict, FlatMapping])
def test_jax_parameters_give_the_logits_of_the_same_network(mapping, tmp_path, monkeypatch):
    """In plain dictionaries of NumPy 2, and in Haiku's mappings of NumPy 1."""
    for name in ("haiku", "haiku._src", FlatMapping.__module__):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FlatMapping.__module__].FlatMapping = FlatMapping
    stored = golden("dm_wrn_16_2_swish")
    pair = np.empty(2, object)
    pair[:] = [
        mapping({name: mapping(values) for name, values in part.items()})
        for part in jax_pair(stored.state)
    ]
    content = pickle.dumps(pair, protocol=3)
    if mapping is FlatMapping:
        content = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        assert b"haiku._src.data_structures\nFlatMapping" in content
    with open(tmp_path / "checkpoint.npy", "wb") as file:
        header = {"descr": "|O", "fortran_order": False, "shape": (2,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(content)
    model = he.zoo.load("deepmind/jax", tmp_path / "checkpoint.npy")
    np.testing.assert_allclose(answers(model, stored.images), stored.logits, rtol=0, atol=1e-5)


def test_half_precision_is_widened(tmp_path):
    stored = golden("fast_preact18")
    halves = {
        name: tensor.astype("float16") if tensor.dtype == "float32" else tensor
        for name, tensor in stored.state.items()
    }
    write_torch(tmp_path / "model.pth", halves)
    model = he.zoo.load("fast_adversarial", tmp_path / "model.pth")
    kernel = model.get_layer("stem_conv").kernel.numpy()
    np.testing.assert_array_equal(kernel.transpose(3, 2, 0, 1), halves["conv1.weight"])
    np.testing.assert_allclose(answers(model, stored.images), stored.logits, rtol=0, atol=0.05)


def test_last_weights_are_taken_and_not_the_best(tmp_path):
    stored = golden("rb_kireev2021_preact18")
    best = {name: np.zeros_like(tensor) for name, tensor in stored.state.items()}
    write_torch(tmp_path / "model.pt", {"best": best, "last": stored.state})
    model = he.zoo.load("robustbench/preact", tmp_path / "model.pt")
    np.testing.assert_allclose(answers(model, stored.images), stored.logits, rtol=0, atol=1e-5)
    assert list(he.zoo.inspect("robustbench/preact", tmp_path / "model.pt").beside) == ["best"]


def test_mean_and_deviation_in_the_file_count_more_than_those_of_the_recipe(tmp_path):
    stored = golden("rb_rice2020_l2_preact18")
    buffers = {"mu": np.zeros((1, 3, 1, 1), "float32"), "sigma": np.ones((1, 3, 1, 1), "float32")}
    path = saved({**buffers, **stored.state}, tmp_path)
    model = he.zoo.load("robustbench/preact", path)
    images = (stored.images - stored.mean) / stored.std
    np.testing.assert_allclose(answers(model, images), stored.logits, rtol=0, atol=1e-5)
    path = saved({"mu": buffers["mu"], **stored.state}, tmp_path)
    with pytest.raises(ValueError, match="missing names.*sigma"):
        he.zoo.load("robustbench/preact", path)


def test_he_head_is_scaled_as_asked(tmp_path):
    stored = golden("at_he_wrn_10_1")
    path = saved(stored.state, tmp_path)
    model = he.zoo.load("at_he", path, scale=15.0, margin=0.3)
    assert (model.head.scale, model.head.margin) == (15.0, 0.3)
    logits = np.asarray(model(stored.images, training=False))
    np.testing.assert_allclose(logits, 15 * stored.logits, rtol=0, atol=2e-5)


def test_wrong_shortcut_gives_other_logits(tmp_path):
    stored = golden("rb_rice2020_l2_preact18")
    path = saved(stored.state, tmp_path)
    model = he.zoo.load("robustbench/preact", path, options={"shortcut": "input"})
    assert np.abs(answers(model, stored.images) - stored.logits).max() > 0.1


def test_model_is_attacked_saved_and_loaded(tmp_path):
    model, stored = loaded("trades_wrn_10_1", tmp_path)
    labels = stored.logits.argmax(1)
    result = he.attacks.get("fgsm", he.ThreatModel())(model, stored.images, labels)
    assert result.margin.max() < np.sort(stored.logits)[:, -1].max()
    model.save(tmp_path / "model.keras")
    again = he.load_classifier(tmp_path / "model.keras")
    np.testing.assert_array_equal(answers(again, stored.images), answers(model, stored.images))
