"""Robustness evaluation."""

from he_keras.drawing import plot_accuracies
from he_keras.evaluation.checks import epsilon_curve, preflight, sanity_checks
from he_keras.evaluation.checks.check import Check
from he_keras.evaluation.corruption_benchmark import CorruptionReport, evaluate_corruptions
from he_keras.evaluation.gate import GateResult, run_gate
from he_keras.evaluation.report import write_html
from he_keras.evaluation.report.comparison_report import compare, write_comparison_html
from he_keras.evaluation.report.robustness_report import RobustnessReport
from he_keras.evaluation.robustness import cost_of_evaluation, evaluate_robustness
from he_keras.evaluation.run.attack_runs import AttackRow
from he_keras.evaluation.run.verification import Verification, verify
from he_keras.evaluation.transfer_matrix import TransferMatrix, transfer_matrix, write_transfer

__all__ = [
    "AttackRow",
    "Check",
    "CorruptionReport",
    "GateResult",
    "RobustnessReport",
    "TransferMatrix",
    "Verification",
    "compare",
    "cost_of_evaluation",
    "epsilon_curve",
    "evaluate_corruptions",
    "evaluate_robustness",
    "plot_accuracies",
    "preflight",
    "run_gate",
    "sanity_checks",
    "transfer_matrix",
    "verify",
    "write_comparison_html",
    "write_html",
    "write_transfer",
]
