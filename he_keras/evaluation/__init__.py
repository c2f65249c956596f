"""Robustness evaluation."""

from he_keras.evaluation.plots import plot_accuracies
from he_keras.evaluation.robustness import AttackRow, RobustnessReport, evaluate_robustness

__all__ = ["AttackRow", "RobustnessReport", "evaluate_robustness", "plot_accuracies"]
