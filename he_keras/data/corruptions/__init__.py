"""The common corruptions of CIFAR-10-C and ImageNet-C, generated without their native libraries.

`CORRUPTIONS` are the fifteen that the benchmarks average over, `EXTRA_CORRUPTIONS` the four extra
ones. Each has five severities, and two tables of parameters: one for images near 32 pixels a side
and one for images near 224. `docs/reference/corruptions.md` has pictures, sources and deviations.
"""

# Importing these files is what registers the corruptions.
from he_keras.data.corruptions import blur as _blur
from he_keras.data.corruptions import digital as _digital
from he_keras.data.corruptions import drops as _drops
from he_keras.data.corruptions import noise as _noise
from he_keras.data.corruptions import weather as _weather
from he_keras.data.corruptions.frost_textures import describe_frost
from he_keras.data.corruptions.registry import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    Setting,
    check_corruption,
    corrupt,
    names,
    register,
)

_FAMILIES = (_noise, _blur, _weather, _digital, _drops)

__all__ = [
    "CORRUPTIONS",
    "EXTRA_CORRUPTIONS",
    "SEVERITIES",
    "Setting",
    "check_corruption",
    "corrupt",
    "describe_frost",
    "names",
    "register",
]
