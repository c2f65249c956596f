"""The gate: is a model good enough to be merged, by limits and against a baseline.

`gate` does all of it in order. `verdicts` holds the rules, `ci_files` writes JUnit XML and SARIF.
"""

from he_keras.evaluation.gate.gate import Baseline, GateResult, read_baseline, run_gate

__all__ = ["Baseline", "GateResult", "read_baseline", "run_gate"]
