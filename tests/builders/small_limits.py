"""Limits for large models and data, set so low that small ones reach them."""

import os

from he_keras.cpu import functions, operations
from he_keras.evaluation import robustness


def take_every_trick(monkeypatch):
    """Has small networks and kernels computed as large ones are, on a machine of two cores."""
    monkeypatch.setattr(operations, "_LARGE_KERNEL", 1)
    monkeypatch.setattr(operations, "_LARGE_GRADIENT", 1)
    monkeypatch.setattr(functions, "_FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def set_block_size(monkeypatch, size):
    """Has evaluations attack so many examples together."""
    monkeypatch.setattr(robustness, "_BLOCK_SIZE", size)
