"""Layers: the hypersphere-embedding head, its normalisation, and the networks' own layers."""

from he_keras.layers.cosine_head import CosineHead
from he_keras.layers.feature_norm import FeatureNorm

__all__ = ["CosineHead", "FeatureNorm"]
