"""Recipes: what a file must contain, and the entries of published files."""

import re
import zipfile

import numpy as np
import pytest
from public_checkpoints import FOLDER, golden, parsed

import he_keras as he
from he_keras.registry import Registry
from he_keras.zoo import architecture, catalog, contents
from he_keras.zoo.tensor_files import write_safetensors

#: For each list of the names in a published file, an entry, and the network that the names are of.
FULL_KEYS = {
    "at_he_wrn_34_20_he": ("at_he/wrn-34-20", "wide_resnet_34_20"),
    "dm_preact18": ("deepmind/preact/cifar10_linf_resnet18_ddpm", "preact_resnet_18"),
    "dm_wrn_28_10": ("deepmind/wrn/cifar10_linf_wrn28-10_with", "wide_resnet_28_10"),
    "dm_wrn_70_16": ("deepmind/wrn/cifar10_linf_wrn70-16_with", "wide_resnet_70_16"),
    "fast_preact18": ("fast_adversarial/preact-resnet-18", "preact_resnet_18"),
    "rb_carmon2019_wrn_28_10_sub": ("robustbench/wrn/Carmon2019Unlabeled", "wide_resnet_28_10"),
    "rb_engstrom2019_resnet50": ("robustbench/resnet/Engstrom2019Robustness", "resnet_50"),
    "rb_pang2020_boosting_34_20": ("robustbench/boosting/Pang2020Boosting", "wide_resnet_34_20"),
    "rb_resnet18": ("robustbench/resnet/Sehwag2021Proxy_R18", "resnet_18"),
    "rb_rice2020_l2_preact18": ("robustbench/preact/Rice2020Overfitting-l2", "preact_resnet_18"),
    "rb_standard_wrn_28_10": ("robustbench/wrn/Standard", "wide_resnet_28_10"),
    "rb_wong2020_preact18": ("robustbench/preact/Wong2020Fast", "preact_resnet_18"),
    "trades_wrn_34_10": ("trades/wrn-34-10", "wide_resnet_34_10"),
}


@pytest.fixture
def no_entries(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(catalog, "RECIPES", Registry("recipe", catalog.RECIPES))
    monkeypatch.setattr(catalog, "ENTRIES", Registry("entry"))


def saved(state, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    write_safetensors(path, state)
    return path


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("block2.layer.0.conv2.weight"), "missing names.*layer.0.conv2.w"),
        (lambda state: state.pop("block2.layer.0.bn2.bias"), "missing names.*block2.layer.0.bn2.b"),
        (lambda state: state.update({"fc.weight": state["fc.weight"][:, :63]}), "another shape"),
        (lambda state: state.update({"bn1.bias": state["bn1.bias"][:-1]}), "another shape"),
        (lambda state: state["bn1.bias"].fill(np.nan), "not finite.*bn1.bias"),
        (lambda state: state.update({"bn1.bias": np.full(64, 1e300)}), "not finite.*bn1.bias"),
        (lambda state: state.update(mu=np.full(3, 1e300), sigma=np.ones(3)), "mean is not finite"),
        (lambda state: state.update({"extra.weight": state["bn1.bias"]}), "unknown names.*extra.w"),
        (lambda state: state.update({"fc.scale": state["fc.bias"]}), "unknown names.*fc.scale"),
        (lambda state: state.pop("fc.weight"), "missing names.*fc.weight"),
        (lambda state: state.pop("fc.bias"), "missing names.*fc.bias"),
        (lambda state: state.pop("bn1.running_var"), "missing names.*bn1.running_var"),
        (lambda state: state.update({"module.bn1.bias": state["bn1.bias"]}), "repeated names"),
    ],
)
def test_file_that_does_not_fit_is_refused(change, message, tmp_path):
    state = golden("rb_wrn_10_1_nosub").state
    change(state)
    with pytest.raises(ValueError, match=message) as refusal:
        he.zoo.load("robustbench/wrn", saved(state, tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name, kernel",
    [
        ("conv1.weight", (2**40, 0, 3, 3)),
        ("block1.layer.0.conv1.weight", (160_000, 16, 1, 1)),
        ("block3.layer.0.conv2.weight", (64, 640, 3, 3)),
        ("block1.layer.900000000.conv1.weight", (16, 16, 3, 3)),
        ("block1.layer.0.conv1.weight", (16,)),
        ("fc.weight", (10,)),
    ],
)
def test_a_small_file_cannot_ask_for_a_large_network(name, kernel, tmp_path):
    state = golden("rb_wrn_10_1_nosub").state
    state[name] = np.zeros(kernel, "float32")
    with pytest.raises(ValueError, match="; expected .*; received") as refusal:
        he.zoo.load("robustbench/wrn", saved(state, tmp_path))
    assert "\n" not in str(refusal.value)


def test_other_recipe_is_refused(tmp_path):
    path = saved(golden("dm_wrn_10_1_swish").state, tmp_path)
    with pytest.raises(ValueError, match="unknown names.*init_conv.weight.*choose another recipe"):
        he.zoo.load("trades", path)
    with pytest.raises(ValueError, match="Unknown checkpoint; expected one of at_he"):
        he.zoo.load("trade", path)
    with pytest.raises(TypeError, match="A recipe has no such field.*activation='relu'"):
        he.zoo.load("deepmind/wrn", path, activation="relu")


def test_linear_head_is_refused_where_the_class_has_none(tmp_path):
    path = saved(golden("at_he_wrn_10_1_plain").state, tmp_path)
    with pytest.raises(ValueError, match="unknown names.*fc.bias"):
        he.zoo.load("robustbench/boosting", path)


def test_what_is_ignored_and_what_is_beside_the_tensors_is_listed():
    found = he.zoo.inspect("at_he", FOLDER / "at_he_wrn_10_1_legacy_cuda.pt")
    assert set(found.beside) == {"test_acc", "test_robust_acc"}
    assert set(found.ignored) == {"sub_block1.*", "*.num_batches_tracked"}
    assert "module.sub_block1.layer.0.bn1.weight" in found.ignored["sub_block1.*"]
    found = he.zoo.inspect("madry", FOLDER / "madry_cifar_resnet18.pt")
    assert {"optimizer", "epoch"} < set(found.beside)
    assert "module.attacker.model.conv1.weight" in found.ignored["attacker.*"]
    np.testing.assert_allclose(found.statistics[1], [0.2023, 0.1994, 0.2010], rtol=1e-6)


@pytest.mark.parametrize("name", FULL_KEYS)
def test_names_and_sizes_of_published_files(name, monkeypatch):
    """By the names and shapes alone: the weights would take a gigabyte."""
    with zipfile.ZipFile(FOLDER / "full_keys.zip") as archive:
        lines = archive.read(f"{name}.txt").decode().splitlines()
    state = {
        key: np.broadcast_to(np.array(1, dtype), shape) for key, shape, dtype in map(parsed, lines)
    }
    monkeypatch.setattr(contents, "read_checkpoint", lambda path: state)
    built = {}
    for family in ("WideResNet", "PreActResNet", "ResNet"):
        monkeypatch.setattr(
            architecture.networks, family, lambda *sizes, **named: built.update(named, sizes=sizes)
        )
    entry_name, network = FULL_KEYS[name]
    entry = next(each for each in he.zoo.entries() if each.name == entry_name)
    recipe, _ = catalog.find(entry_name)
    found = he.zoo.inspect(entry_name, "file")
    layers = {layer: each for layer, each in found.layers.items() if layer != "head"}
    architecture.network_of(recipe.network, layers, recipe.input_shape)
    sizes = built["sizes"]
    assert entry.network == network == built.get("name", "wide_resnet_{}_{}".format(*sizes))
    assert found.layers["head"]["kernel"].shape[1] == 10


def test_file_of_another_size_is_not_the_entry(tmp_path, no_entries):
    state = golden("at_he_wrn_10_1").state
    fields = {"file": "drive:1", "licence": "MIT", "scale": 15.0, "margin": 0.1}
    for name, network in (("small", "wide_resnet_10_1"), ("large", "wide_resnet_34_10")):
        catalog.ENTRIES[f"at_he/{name}"] = he.zoo.Entry(f"at_he/{name}", network=network, **fields)
    path = saved(state, tmp_path)
    head = he.zoo.load("at_he/small", path).head
    assert (head.scale, head.margin) == (15.0, 0.1)
    with pytest.raises(
        ValueError, match="Not the network of at_he/large; expected wide_resnet_34_"
    ):
        he.zoo.load("at_he/large", path)
    plain = saved(golden("at_he_wrn_10_1_plain").state, tmp_path)
    with pytest.raises(ValueError, match="expected .* an HE head; received .* a linear head"):
        he.zoo.load("at_he/small", plain)


def test_a_recipe_is_registered_once_and_its_entries_bear_its_name(no_entries):
    recipe = he.zoo.Recipe("mine", "we", "wide-resnet", {}, ("fc",))
    with pytest.raises(ValueError, match="expected mine/ at the beginning; received 'yours/a'"):
        he.zoo.register(recipe, he.zoo.Entry("yours/a", "drive:1", "wide_resnet_10_1", "MIT"))
    assert he.zoo.register(recipe) is recipe and "mine" in he.zoo.recipes()
    with pytest.raises(ValueError, match="registered twice"):
        he.zoo.register(recipe)


def test_entries_are_complete():
    """All facts that `he-keras zoo` prints."""
    names = [entry.name for entry in he.zoo.entries()]
    assert len(set(names)) == len(names) > 60
    for entry in he.zoo.entries():
        assert any(entry.name.startswith(f"{recipe}/") for recipe in he.zoo.recipes())
        assert entry.page.startswith("http") and entry.licence
        assert entry.address is None or entry.file_name
        assert entry.data in he.data.FACTS
        assert re.fullmatch(r"(wide_resnet_\d+_\d+|(preact_)?resnet_\d+)", entry.network)
        for figure in (entry.clean, entry.robust):
            assert figure is None or figure == 0 or 1 < figure < 100
        if entry.epsilon is not None:
            he.ThreatModel(entry.norm, entry.epsilon)
        catalog_recipe = catalog.find(entry.name)[0]
        assert (entry.scale is None) == (catalog_recipe.cosine == "never")
