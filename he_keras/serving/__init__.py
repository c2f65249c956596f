"""A small HTTP server for SavedModels that speaks TensorFlow Serving's REST predict API.

`serve` runs it, `tools/serve.py` is its command line, and `docs/how-to/serve.md` is its manual. It
serves any SavedModel with signatures. It needs the extra `[serve]`.
"""

from he_keras.serving.server import serve
from he_keras.serving.settings import ServingSettings

__all__ = ["ServingSettings", "serve"]
