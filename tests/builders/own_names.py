"""Takes names that a test registers out again, so that no other test meets them."""

import sys

from he_keras.registry import Registry


def forget(*names):
    """Takes the names out of every registry that a loaded module of the package holds."""
    modules = [each for name, each in sys.modules.items() if name.startswith("he_keras")]
    for module in modules:
        for registry in vars(module).values():
            if isinstance(registry, Registry):
                for name in names:
                    registry.pop(name, None)
