"""Data sets from scikit-learn, arrays, .npz files and image folders: what is read and refused."""

import io
import pickle
import zlib

import numpy as np
import programs
import pytest
from absl import flags
from absl.testing import flagsaver
from prepared_data import numbered_dataset, random_image, write_image

from he_keras import data, experiment

# --- digits ---------------------------------------------------------------------------------------


def test_digits_counts_pixels_and_split():
    import sklearn.datasets

    train, test, everything = (data.load("digits", split) for split in ("train", "test", "all"))
    assert (len(train), len(test), len(everything)) == (1437, 360, 1797)
    assert train.image_shape == (8, 8, 1)
    assert train.num_classes == 10
    assert train.class_names == tuple("0123456789")

    levels = sklearn.datasets.load_digits().images
    expected = np.floor(levels * 255.0 / 16.0 + 0.5).astype(np.uint8)[..., None]
    np.testing.assert_array_equal(everything.images, expected)
    assert len(np.unique(everything.images)) == 17
    assert (everything.images.min(), everything.images.max()) == (0, 255)

    def as_rows(dataset):
        return sorted(image.tobytes() for image in dataset.images)

    assert sorted(as_rows(train) + as_rows(test)) == as_rows(everything)
    class_counts = np.bincount(test.labels)
    assert class_counts.min() >= 35 and class_counts.max() <= 37


def test_digits_split_never_changes():
    test = data.load("digits", "test")
    np.testing.assert_array_equal(test.labels[:10], [9, 2, 5, 7, 6, 9, 7, 3, 3, 3])
    assert zlib.crc32(test.images.tobytes()) == 2052974495


def test_digits_have_no_validation_split_of_their_own():
    with pytest.raises(ValueError, match="validation_examples > 0; received split='validation'"):
        data.load("digits", "validation")


# --- held-out examples ----------------------------------------------------------------------------


def test_validation_examples_partition_the_training_examples():
    arrays = (np.arange(100, dtype=np.uint8).reshape(-1, 1, 1, 1), np.arange(100))
    train = data.load(arrays, "train", validation_examples=30, num_classes=100)
    validation = data.load(arrays, "validation", validation_examples=30, num_classes=100)
    assert (train.split, validation.split) == ("train", "validation")
    assert (len(train), len(validation)) == (70, 30)
    np.testing.assert_array_equal(np.sort([*train.labels, *validation.labels]), np.arange(100))
    # Not simply the last ones, and a smaller set is part of a larger one.
    assert validation.labels.min() < 70
    smaller = data.load(arrays, "validation", validation_examples=10, num_classes=100)
    assert set(smaller.labels) < set(validation.labels)


def test_validation_examples_leave_test_alone():
    np.testing.assert_array_equal(
        data.load("digits", "test", validation_examples=100).labels,
        data.load("digits", "test").labels,
    )


@pytest.mark.parametrize(
    ("split", "count"),
    [("train", -1), ("train", 1.5), ("all", 5), ("train", 1437), ("train", True)],
)
def test_illegal_validation_examples(split, count):
    with pytest.raises(ValueError, match="held-out examples; expected"):
        data.load("digits", split, validation_examples=count)


def test_unknown_split():
    with pytest.raises(ValueError, match="Unknown split; expected one of .*; received split='dev'"):
        data.load("digits", "dev")


# --- sources that are one set ---------------------------------------------------------------------


@pytest.fixture(params=["arrays", "npz", "folder", "streamed folder"])
def one_set(request, tmp_path):
    """Twelve images of class 0, eight of class 1, each of its own grey."""
    labels = np.array([0] * 12 + [1] * 8)
    side = 70 if request.param == "streamed folder" else 6
    images = np.stack([np.full((side, side, 3), 10 * number, np.uint8) for number in range(20)])
    if request.param == "arrays":
        return images, labels
    if request.param == "npz":
        np.savez(tmp_path / "mine.npz", images=images, labels=labels)
        return tmp_path / "mine.npz"
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        write_image(tmp_path / "set" / f"class{label}" / f"{number:02}.png", image)
    return tmp_path / "set"


def numbers_and_labels(dataset):
    stored = [(int(image[0, 0, 0]) // 10, int(label)) for image, label in dataset.examples()]
    return [number for number, _ in stored], [label for _, label in stored]


def test_a_source_without_splits_is_never_train_and_test_at_once(one_set):
    assert len(data.load(one_set, "train")) == len(data.load(one_set, "all")) == 20
    with pytest.raises(ValueError, match="one set without splits.*test_fraction.*images_test"):
        data.load(one_set, "test")
    with pytest.raises(ValueError, match="one set without splits.*validation_examples > 0"):
        data.load(one_set, "validation")
    with pytest.raises(ValueError, match="too small to split.*at least 1/20.*received.*0.04"):
        data.load(one_set, "test", test_fraction=0.04)


def test_a_fraction_makes_splits_that_never_share_an_image(one_set):
    options = {"test_fraction": 0.25, "validation_examples": 5}
    parts = {name: data.load(one_set, name, **options) for name in ("train", "validation", "test")}
    assert [part.split for part in parts.values()] == ["train", "validation", "test"]
    found = {name: numbers_and_labels(part) for name, part in parts.items()}
    numbers = sum((part[0] for part in found.values()), [])
    assert sorted(numbers) == list(range(20))
    # A quarter of each class, always the same ones, and not simply the first ones.
    assert np.bincount(found["test"][1]).tolist() == [3, 2]
    assert found["test"][0] == [3, 5, 9, 12, 19]
    assert len(parts["train"]) == 10


def override_data(config, name):
    """As a program does with --data=NAME."""
    with programs.loaded("evaluate") as program:
        flags.FLAGS.mark_as_parsed()
        with flagsaver.flagsaver(data=name):
            program.model_flags.override_data(config)


def test_the_fraction_of_a_run_goes_with_its_data_only(one_set):
    if isinstance(one_set, tuple):
        pytest.skip("a configuration names files")
    config = experiment.default_config()
    with config.unlocked():
        config.data.update({"name": str(one_set), "test_fraction": 0.25, "validation_examples": 4})
        config.head.num_classes = 2
        side = data.load(one_set, "train").image_shape[0]
        config.network.input_shape = (side, side, 3)
    parts = experiment.load_datasets(config)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [11, 4, 5]
    override_data(config, str(one_set))
    assert len(experiment.load_split(config, "test")) == 5
    override_data(config, f"{one_set.parent}/./{one_set.name}")
    with pytest.raises(ValueError, match="one set without splits"):
        experiment.load_split(config, "test")


def test_a_fraction_is_for_sources_without_splits():
    with pytest.raises(ValueError, match="digits has splits of its own; expected test_fraction=0"):
        data.load("digits", "test", test_fraction=0.2)
    for fraction in (-0.1, 1, 1.5, True, "0.2"):
        with pytest.raises(ValueError, match="illegal share of test examples"):
            data.load((IMAGES, LABELS), "train", test_fraction=fraction)
    with pytest.raises(ValueError, match="and 0 with split='all'"):
        data.load((IMAGES, LABELS), "all", test_fraction=0.5)


# --- arrays ---------------------------------------------------------------------------------------


def test_uint8_arrays_stay_uint8():
    images = np.random.RandomState(0).randint(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    dataset = data.load((images, np.array([[0], [1], [2], [1], [0]], np.int32)), "train")
    assert dataset.images.dtype == np.uint8
    assert dataset.labels.dtype == np.int64
    np.testing.assert_array_equal(dataset.labels, [0, 1, 2, 1, 0])
    assert (dataset.num_classes, dataset.class_names) == (3, ("0", "1", "2"))
    floats, labels = dataset.as_float()
    np.testing.assert_array_equal(floats, images.astype(np.float32) / np.float32(255))
    assert floats.dtype == np.float32
    assert labels is dataset.labels


def test_floating_arrays_become_float32_inside_the_bounds():
    images = np.full((2, 2, 2, 1), 0.5)
    images[0, 0, 0, 0], images[1, 0, 0, 0] = -5e-7, 1.0 + 5e-7
    dataset = data.load((images, [0, 1]), "all")
    assert dataset.images.dtype == np.float32
    assert (dataset.images.min(), dataset.images.max()) == (0.0, 1.0)
    assert dataset.as_float()[0] is dataset.images


IMAGES = np.full((4, 2, 2, 1), 0.25, np.float32)
LABELS = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES * 1000, LABELS, r"outside \[0, 1\].*received images.min\(\)=250"),
        (IMAGES - 0.3, LABELS, r"outside \[0, 1\]"),
        (IMAGES * np.nan, LABELS, "hold NaN"),
        (IMAGES[..., 0], LABELS, r"wrong shape.*received images.shape=\(4, 2, 2\)"),
        (IMAGES[:0], LABELS[:0], "wrong shape"),
        (
            IMAGES.astype(np.int64),
            LABELS,
            "images have the wrong dtype.*received images.dtype=int64",
        ),
        (IMAGES.astype(object), LABELS, "images have the wrong dtype"),
        (IMAGES, LABELS[:3], r"do not match the images; expected shape \(4,\)"),
        (IMAGES, 0.9 * np.eye(2)[LABELS], "do not match the images"),
        (IMAGES, np.ones((4, 2)), "do not match the images"),
        (
            IMAGES,
            LABELS.astype(float),
            "labels have the wrong dtype.*received labels.dtype=float64",
        ),
        (IMAGES, LABELS - 1, r"out of range; expected 0 or more; received labels.min\(\)=-1"),
    ],
)
def test_illegal_arrays(images, labels, message):
    with pytest.raises(ValueError, match=message):
        data.load((images, labels), "train")


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool"])
def test_one_hot_labels_are_class_numbers_and_said_once(dtype):
    with pytest.warns(UserWarning, match="One-hot labels") as said:
        dataset = data.load((IMAGES, np.eye(2)[LABELS].astype(dtype)), "all")
    assert len(said) == 1
    np.testing.assert_array_equal(dataset.labels, LABELS)


def test_one_nan_among_many_is_found():
    images = IMAGES.copy()
    images[2, 1, 1, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        data.load((images, LABELS), "train")


def test_labels_beyond_the_classes():
    with pytest.raises(ValueError, match=r"expected 0..1; received labels.min\(\)=0, .*=2"):
        data.load((IMAGES, [0, 1, 2, 1]), "train", num_classes=2)


@pytest.mark.parametrize("source", [(IMAGES,), (IMAGES, LABELS, LABELS)])
def test_arrays_come_in_pairs(source):
    with pytest.raises(ValueError, match="expected a tuple"):
        data.load(source, "train")


def test_unknown_kind_of_source():
    with pytest.raises(TypeError, match="received type.*=int"):
        data.load(10, "train")


def test_subset_and_take():
    dataset = numbered_dataset(10)
    chosen = dataset.subset([7, 2, 2])
    np.testing.assert_array_equal(chosen.labels, [7, 2, 2])
    np.testing.assert_array_equal(chosen.images, dataset.images[[7, 2, 2]])
    assert (chosen.name, chosen.num_classes) == ("numbered", 10)
    np.testing.assert_array_equal(dataset.take(3).labels, [0, 1, 2])
    assert len(dataset.take(1000)) == 10
    for indices in ([], [10], [-1], [0.5], [[1]]):
        with pytest.raises(ValueError, match="expected a non-empty row of integers in 0..9"):
            dataset.subset(indices)
    with pytest.raises(ValueError, match="received num_examples=0"):
        dataset.take(0)


# --- npz ------------------------------------------------------------------------------------------


def test_npz_as_one_set(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=IMAGES, y=LABELS)
    dataset = data.load(path, "train")
    assert (dataset.name, dataset.split, len(dataset)) == ("mine", "train", 4)
    np.testing.assert_array_equal(dataset.images, IMAGES)
    assert data.load(str(path), "all", num_classes=5).num_classes == 5


def test_npz_with_splits_and_class_names(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez_compressed(
        path,
        images_train=IMAGES,
        labels_train=LABELS,
        images_test=IMAGES[:1],
        labels_test=LABELS[:1],
        class_names=np.array(["cat", "dog", "cow"]),
    )
    assert len(data.load(path, "train")) == 4
    test = data.load(path, "test")
    assert (len(test), test.num_classes, test.class_names) == (1, 3, ("cat", "dog", "cow"))
    with pytest.raises(ValueError, match=r"split 'validation'.*received keys=.*labels_train"):
        data.load(path, "validation")


class Bomb:
    """An object that leaves a trace when it is unpickled."""

    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


def test_npz_is_never_unpickled(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, images=np.array([Bomb()], dtype=object), labels=np.array([0]))
    with pytest.raises(ValueError, match="expected an undamaged .npz of plain arrays"):
        data.load(path, "train")
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="expected an undamaged .npz"):
        data.load(tmp_path / "raw.npz", "train")
    assert not Bomb.exploded


def test_damaged_npz(tmp_path):
    buffer = io.BytesIO()
    noise = np.random.RandomState(0).randint(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    np.savez_compressed(buffer, images=noise, labels=np.arange(50))
    whole = bytearray(buffer.getvalue())
    flipped = bytes(whole[:2000] + bytes(byte ^ 255 for byte in whole[2000:2100]) + whole[2100:])
    single = io.BytesIO()
    np.save(single, noise)
    damaged = {"cut": whole[:3000], "flipped": flipped, "empty": b"", "npy": single.getvalue()}
    for name, content in damaged.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(bytes(content))
        with pytest.raises(ValueError, match=f"{name}.npz cannot be read; expected an undamaged"):
            data.load(path, "train")


# --- image folders --------------------------------------------------------------------------------


def test_small_image_folder_is_read_into_memory(tmp_path):
    images = {
        name: random_image(12, 10, seed=seed)
        for seed, name in enumerate(["cow/b.png", "cow/a.png", "ape/z.png"])
    }
    for name, image in images.items():
        write_image(tmp_path / "farm" / name, image)
    (tmp_path / "farm" / "ape" / "notes.txt").write_text("not an image")
    (tmp_path / "farm" / ".hidden").mkdir()
    dataset = data.load(tmp_path / "farm", "train")
    assert isinstance(dataset, data.ImageDataset)
    assert (dataset.name, dataset.class_names) == ("farm", ("ape", "cow"))
    np.testing.assert_array_equal(dataset.labels, [0, 1, 1])
    expected = [images["ape/z.png"], images["cow/a.png"], images["cow/b.png"]]
    np.testing.assert_array_equal(dataset.images, expected)


def test_image_folder_with_splits_numbers_classes_alike(tmp_path):
    for name in ("train/ape/1.png", "train/bee/1.png", "train/cow/1.png", "test/cow/1.png"):
        write_image(tmp_path / name, random_image(4, 4))
    test = data.load(tmp_path, "test")
    assert (test.num_classes, test.class_names) == (3, ("ape", "bee", "cow"))
    np.testing.assert_array_equal(test.labels, [2])
    with pytest.raises(ValueError, match="no folder for the split; .*received split='validation'"):
        data.load(tmp_path, "validation")


def test_image_folder_channels(tmp_path):
    grey, colour = random_image(4, 4, 1), random_image(4, 4, 4)
    write_image(tmp_path / "grey" / "a" / "1.png", grey)
    assert data.load(tmp_path / "grey", "train").image_shape == (4, 4, 1)
    write_image(tmp_path / "mixed" / "a" / "1.png", grey)
    write_image(tmp_path / "mixed" / "a" / "2.png", colour)
    mixed = data.load(tmp_path / "mixed", "train")
    np.testing.assert_array_equal(mixed.images[0], np.repeat(grey, 3, axis=-1))
    np.testing.assert_array_equal(mixed.images[1], colour[..., :3])


def test_large_image_folder_is_streamed(tmp_path):
    for number in range(3):
        image = np.full((70 + number, 90, 3), 40 * number, np.uint8)
        write_image(tmp_path / f"class{number % 2}" / f"{number}.JPEG", image)
    dataset = data.load(tmp_path, "all")
    assert isinstance(dataset, data.StreamingDataset)
    assert (len(dataset), dataset.num_classes) == (3, 2)
    assert dataset.image_shape == (224, 224, 3)
    shapes, labels = zip(*((x.shape, int(y)) for x, y in dataset.examples()), strict=True)
    assert shapes == ((70, 90, 3), (72, 90, 3), (71, 90, 3))
    assert labels == (0, 0, 1)
    np.testing.assert_array_equal([int(y) for _, y in dataset.subset([2, 0]).examples()], [0, 1])


def test_damaged_image_is_named(tmp_path):
    write_image(tmp_path / "a" / "1.png", random_image(4, 4))
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"expected a PNG or JPEG file; received path='.*2\.png'"):
        data.load(tmp_path, "train")


def test_folders_that_are_no_image_folders(tmp_path):
    with pytest.raises(ValueError, match="expected <folder>/<class>/"):
        data.load(tmp_path, "train")
    (tmp_path / "empty_class").mkdir()
    with pytest.raises(ValueError, match="class folder holds no images.*empty_class"):
        data.load(tmp_path, "train")
    (tmp_path / "file.csv").write_text("1,2")
    with pytest.raises(ValueError, match="expected an .npz file or a folder"):
        data.load(tmp_path / "file.csv", "train")
