"""Checks after the attacks: cheap experiments whose outcome is known where all is sound.

`sample` holds what they share, each other file a few checks; `sanity_checks` runs them all.
"""

from he_keras.evaluation.sanity.all_checks import sanity_checks
from he_keras.evaluation.sanity.radii import epsilon_curve

__all__ = ["epsilon_curve", "sanity_checks"]
