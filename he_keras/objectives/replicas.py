"""The replicas of a training step, under the name that objectives import."""

from he_keras.distribution.replicas import count, number, total

__all__ = ["count", "number", "total"]
