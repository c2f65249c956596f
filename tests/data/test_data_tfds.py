"""Data sets prepared as TFDS does: found, streamed, damaged or missing, never downloaded."""

import socket

import numpy as np
import pytest
import tensorflow as tf
from prepared_data import prepare_imagenet_like, prepare_tfds, random_image

from he_keras import data
from he_keras.data import records, sources

SMALL = [random_image(32, 32, seed=seed) for seed in range(25)]


@pytest.fixture
def no_network(monkeypatch):
    """Makes every attempt to open a connection an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def imagenet_like(tmp_path_factory):
    return prepare_imagenet_like(tmp_path_factory.mktemp("tfds"))


def test_tfds_by_name_by_path_and_offline(tmp_path, monkeypatch, no_network):
    folder = prepare_tfds(tmp_path, "cifar10", {"train": SMALL, "test": SMALL[:7]}, num_shards=3)
    train = data.load("cifar10", "train", data_dir=tmp_path)
    assert isinstance(train, data.ImageDataset)
    assert (train.name, train.split, train.num_classes) == ("cifar10", "train", 10)
    assert train.class_names[3] == "cat"
    np.testing.assert_array_equal(train.images, SMALL)
    np.testing.assert_array_equal(train.labels, np.arange(25) % 10)
    assert len(data.load("cifar10", "test", data_dir=str(tmp_path))) == 7
    assert len(data.load(folder, "test")) == len(data.load(folder.parent, "test")) == 7
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert len(data.load("cifar10", "validation", validation_examples=5)) == 5


def test_tfds_newest_version_wins(tmp_path):
    prepare_tfds(tmp_path, "mnist", {"train": SMALL[:2]}, version="9.0.0")
    prepare_tfds(tmp_path, "mnist", {"train": SMALL[:3]}, version="10.0.0")
    (tmp_path / "mnist" / "incomplete.3TZG_11.0.0").mkdir()
    assert len(data.load("mnist", "train", data_dir=tmp_path)) == 3


def test_any_prepared_data_set_can_be_named(tmp_path):
    prepare_tfds(tmp_path, "svhn_like", {"train": SMALL[:4]})
    assert data.load("svhn_like", "train", data_dir=tmp_path).name == "svhn_like"


def test_tfds_damage_is_reported(tmp_path):
    folder = prepare_tfds(tmp_path, "cifar10", {"train": SMALL}, num_shards=2)
    with pytest.raises(ValueError, match=r"no split 'test'; expected one of \['train'\]"):
        data.load("cifar10", "test", data_dir=tmp_path)
    with pytest.raises(ValueError, match="expected num_classes=10; received num_classes=3"):
        data.load(folder, "train", num_classes=3)
    last = sorted(folder.glob("*.tfrecord-*"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="incomplete; expected 25 examples; received 19"):
        data.load(folder, "train")
    last.write_bytes(content[:100] + bytes(50) + content[150:])
    with pytest.raises(ValueError, match="damaged; expected 25 readable examples; received 0"):
        data.load(folder, "train")
    last.unlink()
    with pytest.raises(ValueError, match="incomplete; expected 2 TFRecord files; received 1"):
        data.load(folder, "train")
    (folder / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="expected an undamaged dataset_info.json"):
        data.load(folder, "train")


def brightness(examples):
    """Returns the position of each image of `prepare_imagenet_like`."""
    return [int(image.numpy()[0, 0, 0]) // 5 for image, _ in examples]


def test_imagenet_streams_and_tests_on_its_validation_images(imagenet_like):
    train = data.load("imagenet2012", "train", data_dir=imagenet_like)
    assert isinstance(train, data.StreamingDataset)
    assert len(train) == 30
    assert brightness(train.examples()) == list(range(30))
    shapes = [tuple(image.shape) for image, _ in train.take(2).examples()]
    assert shapes == [(70, 65, 3), (71, 65, 3)]
    assert len(data.load("imagenet2012", "test", data_dir=imagenet_like)) == 4
    assert len(data.load("imagenet2012", "validation", data_dir=imagenet_like)) == 4


def test_streaming_hold_out_subset_and_take(imagenet_like):
    train = data.load("imagenet2012", "train", data_dir=imagenet_like, validation_examples=8)
    held = data.load("imagenet2012", "validation", data_dir=imagenet_like, validation_examples=8)
    assert (len(train), len(held), held.split) == (22, 8, "validation")
    assert sorted(brightness(train.examples()) + brightness(held.examples())) == list(range(30))
    subset = train.subset([20, 3, 3])
    assert brightness(subset.examples()) == [brightness(train.examples())[i] for i in (3, 20)]
    assert brightness(train.take(5).examples()) == brightness(train.examples())[:5]
    assert sorted(brightness(train.examples(1, 2))) == brightness(train.examples())


@pytest.mark.fast_cases("4")
@pytest.mark.parametrize("window", [4, 2048])
def test_streaming_shuffle_is_a_function_of_seed_and_epoch(imagenet_like, monkeypatch, window):
    monkeypatch.setattr(records, "SHUFFLE_WINDOW", window)
    train = data.load("imagenet2012", "train", data_dir=imagenet_like)
    first = brightness(train.examples(shuffle_seed=1, epoch=0))
    assert sorted(first) == list(range(30))
    assert first != list(range(30))
    tf.random.set_seed(99)
    assert brightness(train.examples(shuffle_seed=1, epoch=0)) == first
    assert brightness(train.examples(shuffle_seed=1, epoch=0, first_example=11)) == first[11:]
    assert brightness(train.examples(shuffle_seed=1, epoch=1)) != first
    assert brightness(train.examples(shuffle_seed=2, epoch=0)) != first


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100", "imagenet2012"])
def test_missing_data_set(tmp_path, no_network, name):
    with pytest.raises(data.DatasetNotFoundError) as caught:
        data.load(name, "train", data_dir=tmp_path)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, FileNotFoundError)
    message = str(caught.value)
    for part in (
        str(tmp_path / name),
        f"tfds build {name} --data_dir={tmp_path}",
        "the path of an .npz file or image folder",
        "TFDS_DATA_DIR",
    ):
        assert part in message
    assert len(message.splitlines()) == 1
    assert ("ILSVRC2012_img_train.tar" in message) == (name == "imagenet2012")
    assert list(tmp_path.iterdir()) == []


def test_missing_data_set_in_the_default_folder(tmp_path, monkeypatch, no_network):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="tensorflow_datasets/cifar10"):
        data.load("cifar10", "train")


def test_neither_name_nor_path(tmp_path, no_network):
    with pytest.raises(data.DatasetNotFoundError, match="'cifar-10' is neither .*'cifar10'"):
        data.load("cifar-10", "train", data_dir=tmp_path)
    with pytest.raises(data.DatasetNotFoundError, match="no such file or folder"):
        data.load(tmp_path / "nothing.npz", "train")


def test_reading_limits_decide_between_memory_and_stream(tmp_path, monkeypatch):
    folder = prepare_tfds(tmp_path, "cifar10", {"train": SMALL[:4]})
    monkeypatch.setattr(sources, "LARGEST_BYTES_IN_MEMORY", 4 * 32 * 32 * 3)
    assert isinstance(data.load(folder, "train"), data.ImageDataset)
    monkeypatch.setattr(sources, "LARGEST_BYTES_IN_MEMORY", 4 * 32 * 32 * 3 - 1)
    assert isinstance(data.load(folder, "train"), data.StreamingDataset)
