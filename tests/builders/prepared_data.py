"""Data sets that the data tests build: in memory, as image files, prepared as TFDS does."""

import json
import pathlib

import numpy as np
import tensorflow as tf

from he_keras import data


def numbered_dataset(num_examples=50, height=8, width=6, channels=3, seed=3):
    """Random images whose labels are their positions, so that a batch tells what it holds."""
    images = np.random.RandomState(seed).randint(
        1, 256, (num_examples, height, width, channels), dtype=np.uint8
    )
    return data.ImageDataset("numbered", "train", images, np.arange(num_examples), num_examples)


def random_image(height, width, channels=3, seed=0):
    shape = (height, width, channels)
    return np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)


def write_image(path: pathlib.Path, image: np.ndarray):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor = tf.constant(image)
    jpeg = path.suffix.lower() != ".png"
    encoded = tf.io.encode_jpeg(tensor, quality=100) if jpeg else tf.io.encode_png(tensor)
    path.write_bytes(encoded.numpy())


def prepare_tfds(data_dir, name, images_by_split, num_shards=1, version="1.0.0"):
    """Prepares a data set as TFDS does: labels are positions modulo 10. Returns its folder."""
    import tensorflow_datasets as tfds

    some_images = next(iter(images_by_split.values()))
    shapes = {image.shape for image in some_images}
    shape = shapes.pop() if len(shapes) == 1 else (None, None, 3)
    features = tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=shape),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
    )
    folder = pathlib.Path(data_dir) / name / version
    folder.mkdir(parents=True)
    split_infos = []
    for split, images in images_by_split.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=name, split=split, filetype_suffix="tfrecord"
        )
        lengths = []
        for shard, positions in enumerate(np.array_split(np.arange(len(images)), num_shards)):
            path = template.sharded_filepath(shard_index=shard, num_shards=num_shards)
            with tf.io.TFRecordWriter(str(path)) as writer:
                for position in positions:
                    example = {
                        "id": f"{split}_{position}",
                        "image": images[position],
                        "label": int(position) % 10,
                    }
                    writer.write(features.serialize_example(features.encode_example(example)))
            lengths.append(len(positions))
        split_infos.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=lengths, num_bytes=1, filename_template=template
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=features,
        split_infos=split_infos,
        filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        supervised_keys=("image", "label"),
        check_data=False,
    )
    metadata = json.loads((folder / "dataset_info.json").read_text())
    metadata.update(name=name, version=version)
    (folder / "dataset_info.json").write_text(json.dumps(metadata))
    return folder


def prepare_imagenet_like(data_dir):
    """Prepares an ImageNet of 30 training images of many sizes, each 5 brighter than the last."""
    images = [np.full((70 + number, 65, 3), 5 * number, np.uint8) for number in range(30)]
    splits = {"train": images, "validation": images[:4], "test": images[:2]}
    prepare_tfds(data_dir, "imagenet2012", splits, num_shards=5)
    return data_dir
