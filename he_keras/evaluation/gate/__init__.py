"""The gate: is a model good enough to be merged, by limits and against a baseline.

`baseline` reads the evaluation to compare with, `verdicts` holds the rules, `ci_files` writes JUnit
XML and SARIF, and `gate` does all of it in order.
"""

from he_keras.evaluation.gate.baseline import Baseline, read_baseline
from he_keras.evaluation.gate.gate import GateResult, run_gate

__all__ = ["Baseline", "GateResult", "read_baseline", "run_gate"]
