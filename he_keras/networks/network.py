"""What every network has in common: the entry for images in [0, 1] and the lookup by name.

A network is a plain functional `keras.Model` from images in [0, 1] to a feature vector. A family is
one file with a function in CamelCase. The function begins with `image_input`, stacks layers with a
`BlockBuilder` and returns the model. It is decorated with `register` (or `register_pattern`) for
each of its names.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from he_keras.arguments import suggestion, unknown_name
from he_keras.layers.input_standardization import Constants, InputStandardization
from he_keras.registry import Registry

ImageShape = tuple[int, int, int]
Statistics = tuple[Constants, Constants]
Builder = Callable[..., keras.Model]

MNIST_STATISTICS = ((0.1307,), (0.3081,))
CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMALLEST_IMAGENET_SIZE = 64

_NETWORKS: Registry[functools.partial] = Registry("network")
_PATTERNS: dict[str, tuple[re.Pattern, Builder]] = {}


def image_input(
    input_shape: ImageShape, minimum_size: int, standardize: bool | Statistics, border: int = 0
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns the float32 input tensor and the tensor that the first layer of the network takes.

    Args:
        input_shape: `(height, width, channels)`.
        minimum_size: The smallest height and width that the network can take.
        standardize: False for images as they are, `(mean, std)` for own constants, or True for
            those of the likely data set: MNIST's for one channel, for three channels ImageNet's if
            height and width are at least 64 and CIFAR-10's below.
        border: Black pixels that are added on every side, before the standardisation.

    Raises:
        ValueError: The shape is not one of images, too small, or without default constants.
    """
    if not _is_image_shape(input_shape):
        raise ValueError(
            "input_shape is not one of images; expected (height, width, channels), three integers; "
            f"received input_shape={input_shape}"
        )
    if min(input_shape[:2]) < minimum_size or input_shape[2] < 1:
        raise ValueError(
            "input_shape is too small for this network; expected a height and width of at least "
            f"{minimum_size} and at least one channel; received input_shape={input_shape}"
        )
    statistics = _statistics(input_shape, standardize)
    images = keras.Input(input_shape, dtype="float32", name="images")
    x = keras.layers.ZeroPadding2D(border, name="border")(images) if border else images
    if statistics is not None:
        x = InputStandardization(*statistics, name="standardization")(x)
    return images, x


def _is_image_shape(shape: object) -> bool:
    """Says whether the shape has the form (height, width, channels)."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 3:
        return False
    return all(isinstance(size, int) for size in shape)


def _statistics(input_shape: ImageShape, standardize: bool | Statistics) -> Statistics | None:
    """Returns `(mean, std)`, or None for images that stay as they are."""
    if standardize is False:
        return None
    if standardize is not True:
        return _given_statistics(standardize)
    height, width, channels = input_shape
    if channels == 1:
        return MNIST_STATISTICS
    if channels == 3:
        is_large = min(height, width) >= SMALLEST_IMAGENET_SIZE
        return IMAGENET_STATISTICS if is_large else CIFAR_STATISTICS
    raise ValueError(
        f"no default mean and std for {channels} channels; expected standardize=False or "
        f"standardize=(mean, std); received standardize=True, input_shape={input_shape}"
    )


def _given_statistics(standardize: Any) -> Statistics:
    """Returns the two parts of `(mean, std)`, each a number or one number for each channel."""
    try:
        mean, std = standardize
    except (TypeError, ValueError):
        raise ValueError(
            "standardize is not understood; expected True, False or (mean, std); "
            f"received standardize={standardize!r}"
        ) from None
    return mean, std


def register(name: str, **presets: Any) -> Callable[[Builder], Builder]:
    """Returns a decorator that makes a builder available as `get(name)`.

    Args:
        name: Lower-case words joined by hyphens.
        **presets: Arguments of the builder that make this one of its networks. They cannot be
            passed to `get` any more.
    """
    _NETWORKS.check_name(name)

    def decorate(builder: Builder) -> Builder:
        _NETWORKS[name] = functools.partial(builder, **presets)
        return builder

    return decorate


def register_pattern(pattern: str, examples: Iterable[str]) -> Callable[[Builder], Builder]:
    """Returns a decorator that makes a builder available under a name with numbers in it.

    Args:
        pattern: The name with integer arguments of the builder in braces, as in
            "wide-resnet-{depth}-{width}". A name registered as a whole comes first.
        examples: Names of this form that `names` lists.
    """
    expression = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[0-9]+)", pattern))

    def decorate(builder: Builder) -> Builder:
        _PATTERNS[pattern] = (expression, builder)
        for example in examples:
            register(example, **_numbers(expression, example))(builder)
        return builder

    return decorate


def _numbers(expression: re.Pattern, name: str) -> dict[str, int]:
    """Returns the numbers in a name, none if the name does not have this form."""
    match = expression.fullmatch(name)
    return {key: int(digits) for key, digits in match.groupdict().items()} if match else {}


def names() -> list[str]:
    """Returns the names that `get` takes, sorted; families such as WideResNet take more.

    Example:
        >>> import he_keras as he
        >>> "preact-resnet-18" in he.networks.names()
        True
    """
    return _NETWORKS.names()


def get(name: str, input_shape: ImageShape | None = None, **options: Any) -> keras.Model:
    """Builds a network by its name.

    Args:
        name: One of `names()`, or any "wide-resnet-D-K" with depth D = 6n + 4 and width factor K.
        input_shape: `(height, width, channels)`; None takes the shape of the family's data set.
        **options: Further arguments of the builder: standardize, activation and synchronized in all
            of them, and those of the family.

    Returns:
        A functional `keras.Model` from images in [0, 1] to a feature vector, named like the network
        with underscores for hyphens.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
        TypeError: The network has no such option; the message lists those it has.

    Example:
        >>> import he_keras as he
        >>> network = he.networks.get("wide-resnet-10-1", input_shape=(16, 16, 3))
        >>> network.name, network.output_shape
        ('wide_resnet_10_1', (None, 64))
    """
    builder = find(name, options)
    if input_shape is not None:
        options["input_shape"] = input_shape
    network = builder(name=name.replace("-", "_"), **options)
    if not isinstance(network, keras.layers.Layer):
        raise TypeError(
            f"The network {name!r} returned none; expected a keras.Model from images to features; "
            f"received {type(network).__name__}"
        )
    taken = tuple(network.input_shape[1:]) if hasattr(network, "input_shape") else input_shape
    if input_shape is not None and taken != tuple(input_shape):
        raise ValueError(
            f"The network {name!r} takes other images than it was built for; expected input_shape="
            f"{tuple(input_shape)}, an argument of its function; received {taken}"
        )
    return network


def find(name: str, options: Mapping[str, Any]) -> functools.partial:
    """Returns the builder of a network; raises as `get` does, and builds nothing.

    Args:
        name: one of `names()`, or a name with numbers in it.
        options: further arguments of the builder.
    """
    builder = _find(name)
    parameters = inspect.signature(builder.func).parameters
    missing = {"input_shape", "name"} - set(parameters)
    if missing:
        raise TypeError(
            f"The network {name!r} lacks an argument; expected input_shape and name, both with "
            f"defaults; received no {sorted(missing)[0]}"
        )
    valid = set(parameters) - {"name", *builder.keywords}
    unknown = sorted(set(options) - valid)
    if unknown:
        raise TypeError(
            f"network {name!r} has no such option; expected some of {sorted(valid)}; "
            f"received {unknown[0]}={options[unknown[0]]!r}{suggestion(unknown[0], valid)}"
        )
    return builder


def _find(name: str) -> functools.partial:
    """Returns the builder of a name with its presets."""
    if name in _NETWORKS:
        return _NETWORKS[name]
    for expression, builder in _PATTERNS.values():
        presets = _numbers(expression, str(name))
        if presets:
            return functools.partial(builder, **presets)
    raise unknown_name("network", name, (*names(), *_PATTERNS))
