"""Public checkpoints give the logits of the published code, in float32 and in float64."""

import keras
import numpy as np
import public_checkpoints
import pytest
from public_checkpoints import FOLDER, golden, write_safetensors

import he_keras as he

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
    path = write_safetensors(tmp_path / "checkpoint.safetensors", stored.state)
    return he.zoo.load(recipe, path, **changes), stored


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


def test_he_head_is_scaled_as_asked(tmp_path):
    stored = golden("at_he_wrn_10_1")
    path = write_safetensors(tmp_path / "checkpoint.safetensors", stored.state)
    model = he.zoo.load("at_he", path, scale=15.0, margin=0.3)
    assert (model.head.scale, model.head.margin) == (15.0, 0.3)
    logits = np.asarray(model(stored.images, training=False))
    np.testing.assert_allclose(logits, 15 * stored.logits, rtol=0, atol=2e-5)


def test_wrong_shortcut_gives_other_logits(tmp_path):
    stored = golden("rb_rice2020_l2_preact18")
    path = write_safetensors(tmp_path / "checkpoint.safetensors", stored.state)
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


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("block2.layer.0.conv2.weight"), "without stage2_block1_2_conv"),
        (lambda state: state.update({"fc.weight": state["fc.weight"][:, :63]}), "another shape"),
        (lambda state: state["bn1.bias"].fill(np.nan), "not finite"),
        (lambda state: state.update({"extra.weight": state["bn1.bias"]}), "unknown names"),
        (lambda state: state.pop("fc.weight"), "missing names"),
        (lambda state: state.pop("bn1.running_var"), "other weights"),
    ],
)
def test_file_that_does_not_fit_is_refused(change, message, tmp_path):
    state = golden("rb_wrn_10_1_nosub").state
    change(state)
    path = write_safetensors(tmp_path / "checkpoint.safetensors", state)
    with pytest.raises(ValueError, match=message) as refusal:
        he.zoo.load("robustbench/wrn", path)
    assert "\n" not in str(refusal.value)


def test_other_recipe_is_refused(tmp_path):
    state = golden("dm_wrn_10_1_swish").state
    path = write_safetensors(tmp_path / "checkpoint.safetensors", state)
    with pytest.raises(ValueError, match="unknown names.*init_conv.weight.*choose another recipe"):
        he.zoo.load("trades", path)
    with pytest.raises(ValueError, match="Unknown checkpoint; expected one of at_he"):
        he.zoo.load("trade", path)


def test_every_entry_has_a_recipe_and_published_figures_are_percentages():
    names = [entry.name for entry in he.zoo.entries()]
    assert len(set(names)) == len(names)
    for entry in he.zoo.entries():
        assert any(entry.name.startswith(f"{recipe}/") for recipe in he.zoo.recipes())
        for figure in (entry.clean, entry.robust):
            assert figure is None or 1 < figure < 100
        he.ThreatModel(entry.norm, entry.epsilon)
