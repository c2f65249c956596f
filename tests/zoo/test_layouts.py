"""Models in the layouts of RobustBench's classes: the way out of Keras, and back."""

import keras
import numpy as np
import pytest
from public_checkpoints import FOLDER, golden

import he_keras as he
from he_keras.zoo.checkpoint_files import read_checkpoint
from he_keras.zoo.layouts import layout_of
from he_keras.zoo.tensor_files import write_safetensors, write_torch

_RAW = {"statistics": False, "options": {"shortcut": "input"}}
_RELU = {"options": {"activation": "relu"}}
CASES = {
    "at_he_wrn_10_1": ("at_he", {}, "robustbench/boosting"),
    "trades_wrn_10_1": ("trades", {}, "robustbench/wrn"),
    "dm_wrn_10_1_swish": ("deepmind/wrn", {}, "deepmind/wrn"),
    "dm_wrn_10_1_relu": ("deepmind/wrn", _RELU, "deepmind/wrn"),
    "rb_andriushchenko2020_preact18": ("robustbench/preact", _RAW, "robustbench/preact"),
    "rb_rice2020_l2_preact18": ("robustbench/preact", {}, "robustbench/preact"),
    "rb_resnet18": ("robustbench/resnet", {}, "robustbench/resnet"),
    "madry_cifar_resnet50": ("madry", {}, "robustbench/resnet"),
}
FAST = ("at_he_wrn_10_1", "rb_resnet18")


def imported(name, tmp_path):
    recipe, changes, _ = CASES[name]
    write_safetensors(tmp_path / "in.safetensors", golden(name).state)
    return he.zoo.load(recipe, tmp_path / "in.safetensors", **changes)


def outputs(model, images):
    return np.asarray(model(images, training=False))


@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in CASES if each not in FAST)],
)
def test_round_trip_is_bit_identical(name, tmp_path):
    """Keras, PyTorch's layout, Keras: the weights and the logits."""
    model = imported(name, tmp_path)
    layout = layout_of(model)
    assert layout.recipe.name == CASES[name][2]
    write_torch(tmp_path / "out.pt", layout.tensors)
    write_safetensors(tmp_path / "out.safetensors", layout.tensors)
    images = golden(name).images
    not_stored = {"options": layout.recipe.options, "statistics": layout.recipe.statistics}
    for file in ("out.pt", "out.safetensors"):
        again = he.zoo.load(layout.recipe.name, tmp_path / file, **not_stored)
        for ours, theirs in zip(model.weights, again.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(outputs(model, images), outputs(again, images))


def test_he_model_has_the_keys_and_shapes_that_boosting_wide_resnet_expects(tmp_path):
    tensors = layout_of(imported("at_he_wrn_10_1", tmp_path)).tensors
    stored = golden("rb_boosting_wrn_10_1").state
    counters = [name for name in stored if name.endswith("num_batches_tracked")]
    expected = {name: stored[name].shape for name in stored if name not in counters}
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}
    np.testing.assert_allclose(tensors["mu"].ravel(), [0.4914, 0.4822, 0.4465], rtol=1e-6)
    np.testing.assert_array_equal(
        tensors["fc.weight"], golden("at_he_wrn_10_1").state["module.fc.weight"]
    )


def test_he_model_without_standardisation_stores_zero_and_one():
    network = he.networks.get("wide-resnet-10-1", standardize=False)
    tensors = layout_of(he.HEAdversarialModel(network, he.CosineHead(10))).tensors
    assert not tensors["mu"].any() and (tensors["sigma"] == 1).all()


def test_own_he_model_becomes_public(tmp_path):
    """A network with the package's own names, constants and initial weights."""
    keras.utils.set_random_seed(1)
    network = he.networks.get("wide-resnet-10-2")
    model = he.HEAdversarialModel(network, he.CosineHead(10, scale=15.0))
    layout = layout_of(model)
    write_torch(tmp_path / "mine.pt", {"state_dict": layout.tensors})
    again = he.zoo.load("robustbench/boosting", tmp_path / "mine.pt", scale=15.0)
    images = golden("at_he_wrn_10_1").images
    np.testing.assert_array_equal(outputs(model, images), outputs(again, images))
    np.testing.assert_array_equal(model.cosines(images), again.cosines(images))


@pytest.mark.parametrize(
    "head, network, message",
    [
        (he.CosineHead(10, angle="arc"), {}, "a head CosineHead with settings"),
        (he.CosineHead(10, feature_norm=False), {}, "a head CosineHead with settings"),
        (he.CosineHead(100), {}, "100 classes: BoostingWideResNet has 10"),
        (keras.layers.Dense(10, activation="log_softmax"), {}, "a head Dense with settings"),
        (he.CosineHead(10), {"activation": "softplus"}, "the network wide_resnet_10_1"),
        (he.CosineHead(10), {"activation": "swish"}, "the network wide_resnet_10_1"),
        (he.CosineHead(10), {"padding": "same"}, "the network wide_resnet_10_1"),
        (he.CosineHead(10), {"input_shape": (28, 28, 1)}, r"images of shape \(28, 28, 1\)"),
    ],
)
def test_what_no_class_computes_is_refused(head, network, message):
    model = he.HEAdversarialModel(he.networks.get("wide-resnet-10-1", **network), head)
    with pytest.raises(ValueError, match=f"No class of RobustBench.*received {message}"):
        layout_of(model)


def test_other_models_are_refused():
    small = keras.Sequential(
        [keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    for model in (small, lambda images: images, keras.Sequential()):
        with pytest.raises(ValueError, match="No class of RobustBench computes this model"):
            layout_of(model)


def test_files_are_the_same_each_time_and_keep_every_type(tmp_path):
    draw = np.random.RandomState(0)
    tensors = {
        "single": draw.randn(2, 3, 4).astype("float32"),
        "double": draw.randn(3, 2).T,
        "half": draw.randn(5).astype("float16"),
        "count": np.array(2**40),
        "none": np.zeros((0, 3), "float32"),
        "sign": np.array([True, False]),
        "big-endian": np.array([1, 2], ">i4"),
    }
    for write, name in ((write_torch, "a.pt"), (write_safetensors, "a.safetensors")):
        write(tmp_path / name, tensors)
        content = (tmp_path / name).read_bytes()
        write(tmp_path / name, tensors)
        assert content == (tmp_path / name).read_bytes()
        again = read_checkpoint(tmp_path / name)
        assert list(again) == list(tensors)
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(again[key], tensor)
            assert again[key].dtype == tensor.dtype.newbyteorder("<")
        with pytest.raises(
            ValueError, match="A tensor of an unknown type; .* received a of complex"
        ):
            write(tmp_path / name, {"a": np.ones(1, "complex64")})


def torch_wide_resnet(torch, tensors, images):
    """RobustBench's `BoostingWideResNet`, by PyTorch's functions: the cosines of images."""
    functional = torch.nn.functional

    def activated(x, name):
        parts = [tensors[f"{name}.{part}"] for part in ("running_mean", "running_var")]
        scale, shift = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.batch_norm(x, *parts, scale, shift, eps=1e-5).relu()

    x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    x = functional.conv2d(
        (x - tensors["mu"]) / tensors["sigma"], tensors["conv1.weight"], padding=1
    )
    for group in (1, 2, 3):
        block = 0
        while f"block{group}.layer.{block}.conv1.weight" in tensors:
            name = f"block{group}.layer.{block}"
            stride = 2 if group > 1 and block == 0 else 1
            a = activated(x, f"{name}.bn1")
            y = functional.conv2d(a, tensors[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = activated(y, f"{name}.bn2")
            y = functional.conv2d(y, tensors[f"{name}.conv2.weight"], padding=1)
            shortcut = tensors.get(f"{name}.convShortcut.weight")
            x = y + (x if shortcut is None else functional.conv2d(a, shortcut, stride=stride))
            block += 1
    features = functional.normalize(activated(x, "bn1").mean((2, 3)))
    return functional.linear(features, functional.normalize(tensors["fc.weight"])).numpy()


def test_pytorch_reads_the_file_and_computes_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    network = he.networks.get("wide-resnet-16-2")
    model = he.HEAdversarialModel(network, he.CosineHead(10))
    write_torch(tmp_path / "a.pt", layout_of(model).tensors)
    tensors = torch.load(tmp_path / "a.pt", weights_only=True)
    images = golden("at_he_wrn_10_1").images
    cosines = torch_wide_resnet(torch, tensors, images)
    np.testing.assert_allclose(model.cosines(images), cosines, rtol=0, atol=1e-5)


def test_pytorch_reads_every_tensor(tmp_path):
    torch = pytest.importorskip("torch")
    write_torch(tmp_path / "a.pt", {"state_dict": golden("at_he_wrn_10_1").state})
    ours = torch.load(tmp_path / "a.pt", weights_only=True)["state_dict"]
    path = FOLDER / "at_he_wrn_10_1_legacy_cuda.pt"
    theirs = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
