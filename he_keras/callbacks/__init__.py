"""Callbacks: resume, history, best checkpoint, snapshots, weight averaging, guard, progress."""

from he_keras.callbacks.batch_norm_statistics import reestimate_batch_norm
from he_keras.callbacks.best_checkpoint import BestCheckpoint
from he_keras.callbacks.exact_resume import CorruptCheckpointError, ExactResume, ResumePoint
from he_keras.callbacks.history_file import HistoryFile
from he_keras.callbacks.overfitting_guard import OverfittingGuard
from he_keras.callbacks.progress import ProgressBar, StopOnNaN
from he_keras.callbacks.snapshots import Snapshots
from he_keras.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "BestCheckpoint",
    "CorruptCheckpointError",
    "ExactResume",
    "HistoryFile",
    "OverfittingGuard",
    "ProgressBar",
    "ResumePoint",
    "Snapshots",
    "StopOnNaN",
    "WeightAveraging",
    "reestimate_batch_norm",
]
