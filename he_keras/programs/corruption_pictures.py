"""Draws the pictures of docs/reference/corruptions.md, or with --speed prints its table of speeds.

Every corruption at every severity. One picture is a CIFAR-10 test image, enlarged three times; the
other a 224 x 224 part of a photograph that comes with scikit-learn.
"""

import pathlib
import time

from absl import flags

from he_keras.programs import cli

_OUTPUT_DIR = flags.DEFINE_string("output_dir", "docs/images", "Folder for the pictures.")
_DATA = flags.DEFINE_string("data", "cifar10", "Data set of small images, by name or path.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.")
_EXAMPLES = flags.DEFINE_list("examples", ["7", "30"], "Test images to show, one sheet each.")
_FROST_DIR = flags.DEFINE_string("frost_dir", None, "Folder of frost pictures.")
_SPEED = flags.DEFINE_bool("speed", False, "Measure images per second instead.")

_GAP, _LABEL_WIDTH, _HEADER_HEIGHT = 3, 110, 16
_PHOTOGRAPHS = ("china.jpg", "flower.jpg")
_LARGE_SIDE, _SMALL_ZOOM = 224, 3
_GROUPS = {"noise": slice(0, 3), "blur": slice(3, 7), "weather": slice(7, 11)}


def main(_) -> None:
    """Draws or measures."""
    with cli.one_line_errors():
        if _SPEED.value:
            print(_speeds())
            return
        folder = pathlib.Path(_OUTPUT_DIR.value)
        for path in [*_small_sheets(folder), *_large_sheets(folder)]:
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _small_sheets(folder: pathlib.Path):
    import numpy as np

    import he_keras as he
    from he_keras.data import corruptions

    dataset = he.data.load(_DATA.value, "test", data_dir=_DATA_DIR.value)
    if not isinstance(dataset, he.data.ImageDataset):
        raise ValueError(f"No small images; expected up to 64 pixels; received {_DATA.value}")
    for number, example in enumerate(_EXAMPLES.value, 1):
        images, _ = dataset.subset([int(example)]).as_float()
        image = np.rint(images[0] * 255).astype(np.uint8)
        path = folder / f"corruptions_32_{number}.png"
        yield _save(_sheet(image, corruptions.names(), _SMALL_ZOOM), path)


def _large_sheets(folder: pathlib.Path):
    from he_keras.data import corruptions

    groups = {group: tuple(corruptions.CORRUPTIONS[rows]) for group, rows in _GROUPS.items()}
    groups["digital"] = tuple(corruptions.CORRUPTIONS[11:])
    groups["extra"] = tuple(corruptions.EXTRA_CORRUPTIONS)
    for group, chosen in groups.items():
        photograph = _photograph(_PHOTOGRAPHS[group in ("blur", "extra")])
        yield _save(_sheet(photograph, chosen, 1), folder / f"corruptions_224_{group}.jpg")


def _photograph(name: str):
    """Returns the middle of one of scikit-learn's pictures, (224, 224, 3)."""
    import numpy as np
    import PIL.Image
    import sklearn.datasets

    picture = sklearn.datasets.load_sample_image(name)
    side = min(picture.shape[:2])
    top, left = (picture.shape[0] - side) // 2, (picture.shape[1] - side) // 2
    square = PIL.Image.fromarray(picture[top : top + side, left : left + side])
    return np.asarray(square.resize((_LARGE_SIDE, _LARGE_SIDE), PIL.Image.Resampling.LANCZOS))


def _sheet(image, chosen, zoom: int):
    """Returns a picture with one row for each corruption: the image and its five severities."""
    import PIL.Image
    import PIL.ImageDraw

    from he_keras.data import corruptions

    cell = image.shape[0] * zoom + _GAP
    size = (_LABEL_WIDTH + 6 * cell, _HEADER_HEIGHT + len(chosen) * cell)
    sheet = PIL.Image.new("RGB", size, "white")
    draw = PIL.ImageDraw.Draw(sheet)
    for column, title in enumerate(("clean", *map(str, corruptions.SEVERITIES))):
        draw.text((_LABEL_WIDTH + column * cell, 2), title, "black")
    for row, name in enumerate(chosen):
        top = _HEADER_HEIGHT + row * cell
        draw.text((2, top + cell // 2 - 6), name, "black")
        shown = [image] + [
            corruptions.corrupt(image[None], name, severity, frost_dir=_FROST_DIR.value)[0]
            for severity in corruptions.SEVERITIES
        ]
        for column, each in enumerate(shown):
            picture = PIL.Image.fromarray(each)
            picture = picture.resize((cell - _GAP,) * 2, PIL.Image.Resampling.NEAREST)
            sheet.paste(picture, (_LABEL_WIDTH + column * cell, top))
    return sheet


def _save(sheet, path: pathlib.Path) -> pathlib.Path:
    from he_keras.files import replacing

    with replacing(path) as temporary:
        if path.suffix == ".png":
            sheet.quantize(256).save(temporary, optimize=True)
        else:
            sheet.save(temporary, quality=85, optimize=True)
    return path


def _speeds() -> str:
    """Returns a table: images per second, the mean over the five severities."""
    from he_keras.data import corruptions

    lines = ["| corruption | 32 x 32 | 224 x 224 |", "|---|---|---|"]
    all_rates = []
    for name in corruptions.names():
        rates = [_rate(name, 32, 256), _rate(name, _LARGE_SIDE, 4)]
        all_rates.append(rates)
        lines.append(f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} |")
    medians = (sorted(column)[len(column) // 2] for column in zip(*all_rates, strict=True))
    small, large = medians
    return "\n".join([*lines, f"| **median** | **{small:,.0f}** | **{large:,.0f}** |"])


def _rate(name: str, side: int, count: int) -> float:
    import numpy as np

    from he_keras.data import corruptions

    images = np.random.RandomState(0).randint(0, 256, (count, side, side, 3), dtype=np.uint8)
    # What is built once, such as frost textures and kernels, does not count.
    for severity in corruptions.SEVERITIES:
        corruptions.corrupt(images[:1], name, severity, frost_dir=_FROST_DIR.value)
    began = time.perf_counter()
    for severity in corruptions.SEVERITIES:
        corruptions.corrupt(images, name, severity, frost_dir=_FROST_DIR.value)
    return len(corruptions.SEVERITIES) * count / (time.perf_counter() - began)
