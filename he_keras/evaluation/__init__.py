"""Robustness evaluation."""

from he_keras.evaluation.robustness import AttackRow, RobustnessReport, evaluate_robustness

__all__ = ["AttackRow", "RobustnessReport", "evaluate_robustness"]
