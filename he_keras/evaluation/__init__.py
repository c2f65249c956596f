"""Robustness evaluation."""

from he_keras.evaluation.attack_runs import AttackRow
from he_keras.evaluation.plots import plot_accuracies
from he_keras.evaluation.robustness import RobustnessReport, evaluate_robustness

__all__ = ["AttackRow", "RobustnessReport", "evaluate_robustness", "plot_accuracies"]
