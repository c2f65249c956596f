"""Checks before and after the attacks: `table` lists them all, each other file holds a few."""

from he_keras.evaluation.checks.radii import epsilon_curve
from he_keras.evaluation.checks.table import preflight, sanity_checks

__all__ = ["epsilon_curve", "preflight", "sanity_checks"]
