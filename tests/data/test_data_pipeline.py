"""Pipelines: what a stream contains, how it resumes, and how fast it is."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from prepared_data import numbered_dataset, prepare_imagenet_like, random_image, write_image

from he_keras import data


@pytest.fixture(scope="module")
def imagenet_like(tmp_path_factory):
    return prepare_imagenet_like(tmp_path_factory.mktemp("tfds"))


def collect(stream):
    """Returns the batches of a stream as NumPy arrays."""
    return [(images.numpy(), labels.numpy()) for images, labels in stream]


def assert_same_batches(first, second):
    assert len(first) == len(second)
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        np.testing.assert_array_equal(images, other_images)
        np.testing.assert_array_equal(labels, other_labels)


def test_eval_pipeline_drops_nothing_and_keeps_order():
    dataset = numbered_dataset(50)
    stream = data.eval_pipeline(dataset, 16)
    batches = collect(stream)
    assert [len(labels) for _, labels in batches] == [16, 16, 16, 2]
    assert len(stream) == 4
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), np.arange(50))
    images = np.concatenate([x for x, _ in batches])
    np.testing.assert_array_equal(images, dataset.images.astype(np.float32) / np.float32(255.0))
    assert images.dtype == np.float32
    limited = collect(data.eval_pipeline(dataset, 16, limit=20))
    assert [len(labels) for _, labels in limited] == [16, 4]


def test_streaming_eval_pipeline(imagenet_like):
    train = data.load("imagenet2012", "train", data_dir=imagenet_like)
    batches = collect(data.eval_pipeline(train, 4, limit=11))
    assert [images.shape for images, _ in batches] == [(4, 224, 224, 3)] * 2 + [(3, 224, 224, 3)]
    positions = np.concatenate([images[:, 9, 9, 0] for images, _ in batches]) * 255 / 5
    np.testing.assert_allclose(positions, np.arange(11), atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), np.arange(11) % 10)


def test_train_pipeline_shuffles_anew_every_epoch_and_loses_nothing():
    dataset = numbered_dataset(50)
    batches = collect(data.train_pipeline(dataset, 16, seed=4, epochs=3))
    assert [len(labels) for _, labels in batches] == [16, 16, 16, 2] * 3
    epochs = [np.concatenate([y for _, y in batches[4 * e : 4 * e + 4]]) for e in range(3)]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.arange(50))
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])
    for images, labels in batches:
        np.testing.assert_array_equal(images, dataset.images[labels] / np.float32(255.0))


def test_train_pipeline_makes_only_legal_crops():
    dataset = numbered_dataset(40, height=5, width=6)
    seen = set()
    for images, labels in data.train_pipeline(dataset, 8, augmentation="crop-flip", epochs=2):
        for image, label in zip(images.numpy(), labels.numpy(), strict=True):
            padded = np.pad(dataset.images[label], ((4, 4), (4, 4), (0, 0)))
            padded = padded.astype(np.float32) / np.float32(255.0)
            views = {
                (row, column, flip): padded[row : row + 5, column : column + 6][:, ::flip]
                for row in range(9)
                for column in range(9)
                for flip in (1, -1)
            }
            matches = [key for key, view in views.items() if np.array_equal(view, image)]
            assert matches
            seen.add(matches[0])
    assert len(seen) > 50


MEMORY_AUGMENTATIONS = ["none", "flip", "crop-flip", "resized-crop-flip"]


def numbered_stream(batch_size, augmentation_name, **options):
    options = {"seed": 7, "augmentation": augmentation_name, **options}
    return data.train_pipeline(numbered_dataset(30), batch_size, **options)


@functools.cache
def uninterrupted(augmentation_name, drop_remainder=False):
    """Returns the batches, of 8 examples each, of three epochs."""
    options = {"epochs": 3, "drop_remainder": drop_remainder}
    return collect(numbered_stream(8, augmentation_name, **options))


# A first batch of -1 is the last one of its epoch.
PLACES = [(0, 2), (1, -1), (2, 0)]


def resumptions():
    """Every place with one augmentation; the others in one place, and in all in the slow tests."""
    for name, drop_remainder in [(name, False) for name in MEMORY_AUGMENTATIONS] + [
        ("crop-flip", True)
    ]:
        for place in PLACES:
            is_slow = place != PLACES[1] and (name, drop_remainder) != ("crop-flip", False)
            marks = [pytest.mark.slow] * is_slow
            yield pytest.param(name, drop_remainder, *place, marks=marks)


@pytest.mark.fast_cases(
    "none-False-1--1", "crop-flip-False-1--1", "crop-flip-True-1--1", "crop-flip-False-2-0"
)
@pytest.mark.parametrize(
    ("augmentation_name", "drop_remainder", "epoch", "first_batch"), [*resumptions()]
)
def test_resumed_stream_is_bit_exact(augmentation_name, drop_remainder, epoch, first_batch):
    whole = uninterrupted(augmentation_name, drop_remainder)
    steps = data.steps_per_epoch(numbered_dataset(30), 8, drop_remainder)
    assert len(whole) == 3 * steps
    tf.random.set_seed(1234)
    place = {"initial_epoch": epoch, "first_batch": first_batch % steps}
    options = {"epochs": 3, "drop_remainder": drop_remainder}
    stream = numbered_stream(8, augmentation_name, **options, **place)
    expected = whole[epoch * steps + first_batch % steps :]
    assert len(stream) == len(expected)
    assert_same_batches(collect(stream), expected)


@pytest.mark.slow
@pytest.mark.parametrize("augmentation_name", ["none", "flip", "resized-crop-flip"])
def test_resumed_streaming_stream_is_bit_exact(imagenet_like, augmentation_name):
    dataset = data.load("imagenet2012", "train", data_dir=imagenet_like)
    options = {"seed": 7, "augmentation": augmentation_name, "epochs": 2}
    whole = collect(data.train_pipeline(dataset, 8, **options))
    assert [len(y) for _, y in whole] == [8, 8, 8, 6] * 2
    assert {images.shape[1:] for images, _ in whole} == {(224, 224, 3)}
    resumed = data.train_pipeline(dataset, 8, initial_epoch=1, first_batch=2, **options)
    assert_same_batches(collect(resumed), whole[6:])


@pytest.mark.slow
def test_resumed_image_folder_stream_is_bit_exact(tmp_path):
    for number in range(7):
        write_image(tmp_path / "a" / f"{number}.png", random_image(66, 80 + number, seed=number))
    dataset = data.load(tmp_path, "train")
    options = {"augmentation": "resized-crop-flip", "epochs": 2}
    whole = collect(data.train_pipeline(dataset, 2, **options))
    resumed = data.train_pipeline(dataset, 2, initial_epoch=1, first_batch=1, **options)
    assert_same_batches(collect(resumed), whole[5:])


@pytest.mark.fast_cases("none", "crop-flip")
@pytest.mark.parametrize("augmentation_name", MEMORY_AUGMENTATIONS)
def test_batch_size_does_not_change_what_becomes_of_an_example(augmentation_name):
    ((images, labels),) = collect(numbered_stream(30, augmentation_name))
    batches = uninterrupted(augmentation_name)[:4]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), images)
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), labels)


def test_seeds_give_different_streams():
    dataset = numbered_dataset(30)
    orders = [
        np.concatenate([y for _, y in collect(data.train_pipeline(dataset, 30, seed=seed))])
        for seed in (0, 1)
    ]
    assert not np.array_equal(*orders)


def test_float_images_pass_through_unscaled():
    images = np.random.RandomState(0).rand(6, 4, 4, 1).astype(np.float32)
    dataset = data.load((images, np.arange(6)), "train")
    ((got, labels),) = collect(data.train_pipeline(dataset, 6))
    np.testing.assert_array_equal(got, images[labels])
    ((got, _),) = collect(data.eval_pipeline(dataset, 6))
    np.testing.assert_array_equal(got, images)


def test_no_thread_tunes_a_stream():
    """Deleting an iterator would wait for it: measured, 2 to 54 seconds at the end of `fit`."""
    dataset = data.load("digits", "test")
    streams = [data.train_pipeline(dataset, 8), data.eval_pipeline(dataset, 8)]
    assert [stream.options().autotune.enabled for stream in streams] == [False, False]


def test_static_shapes():
    dataset = numbered_dataset(30)
    for name in ("crop-flip", "resized-crop-flip"):
        free = data.train_pipeline(dataset, 8, augmentation=name).element_spec
        assert free[0].shape.as_list() == [None, 8, 6, 3]
        fixed = data.train_pipeline(dataset, 8, augmentation=name, drop_remainder=True).element_spec
        assert fixed[0].shape.as_list() == [8, 8, 6, 3]
        assert (fixed[0].dtype, fixed[1].dtype) == (tf.float32, tf.int64)


def test_keras_fit_takes_one_stream_of_all_epochs():
    seen = []

    class Watch(keras.layers.Layer):
        def call(self, images):
            tf.py_function(lambda x: seen.append(float(tf.reduce_sum(x))), [images], [])
            return images

    dataset = numbered_dataset(20)
    model = keras.Sequential([Watch(), keras.layers.Flatten(), keras.layers.Dense(20)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    stream = data.train_pipeline(dataset, 8, epochs=2)
    expected = [float(tf.reduce_sum(images)) for images, _ in stream]
    model.fit(stream, epochs=2, steps_per_epoch=3, verbose=0)
    assert seen == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "mixup"}, "Unknown augmentation; expected one of .*'mixup'"),
        ({"epochs": 0}, "Invalid epochs; expected an integer >= 1"),
        ({"epochs": 2, "initial_epoch": 2}, r"expected initial_epoch in 0..1"),
        ({"first_batch": 4}, r"first_batch in 0..3; received .*first_batch=4"),
        ({"first_batch": -1}, "first_batch=-1"),
        ({"batch_size": 0}, "Invalid batch_size; expected an integer >= 1"),
        ({"batch_size": 51, "drop_remainder": True}, "no whole batch; expected batch_size"),
        ({"seed": None}, "Invalid seed; expected an integer"),
    ],
)
def test_illegal_pipeline_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        data.train_pipeline(numbered_dataset(50), **{"batch_size": 16, **options})


def test_streaming_has_no_crop_flip(imagenet_like):
    train = data.load("imagenet2012", "train", data_dir=imagenet_like)
    with pytest.raises(ValueError, match="crop-flip needs images of one size in memory"):
        data.train_pipeline(train, 4, augmentation="crop-flip")


def test_steps_per_epoch():
    dataset = numbered_dataset(50)
    assert data.steps_per_epoch(dataset, 16) == 4
    assert data.steps_per_epoch(dataset, 16, drop_remainder=True) == 3
    assert data.steps_per_epoch(dataset, 50) == 1


def test_streams_work_on_two_replicas():
    strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    dataset = numbered_dataset(30)
    stream = data.train_pipeline(dataset, 8, augmentation="crop-flip")
    expected = collect(stream)
    distributed = strategy.experimental_distribute_dataset(stream)
    got = []
    for images, labels in distributed:
        parts = [strategy.experimental_local_results(value) for value in (images, labels)]
        got.append(tuple(np.concatenate([part.numpy() for part in value]) for value in parts))
    assert_same_batches(got, expected)


def test_measure_throughput_counts_images():
    dataset = numbered_dataset(50)
    assert data.measure_throughput(data.eval_pipeline(dataset, 5), max_seconds=0.1) > 0
    with pytest.raises(ValueError, match="too short to measure"):
        data.measure_throughput(data.eval_pipeline(dataset, 50), warm_up_batches=1)
