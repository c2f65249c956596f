"""Data sets and their pipelines for training and evaluation."""

from he_keras.data import corruptions
from he_keras.data.datasets import ImageDataset, StreamingDataset
from he_keras.data.facts import FACTS, DatasetFacts, default_augmentation
from he_keras.data.loading import DatasetNotFoundError, load, register, synthetic
from he_keras.data.pipeline import (
    eval_pipeline,
    measure_throughput,
    steps_per_epoch,
    train_pipeline,
)

__all__ = [
    "FACTS",
    "DatasetFacts",
    "DatasetNotFoundError",
    "ImageDataset",
    "StreamingDataset",
    "corruptions",
    "default_augmentation",
    "eval_pipeline",
    "load",
    "measure_throughput",
    "register",
    "steps_per_epoch",
    "synthetic",
    "train_pipeline",
]
