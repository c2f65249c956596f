"""Layers: the hypersphere-embedding head, its normalisation, and the networks' own layers."""

from he_keras.layers.batch_norm import BatchNormalization
from he_keras.layers.convolution import Conv2D
from he_keras.layers.cosine_head import CosineHead
from he_keras.layers.feature_norm import FeatureNorm
from he_keras.layers.input_standardization import InputStandardization

__all__ = ["BatchNormalization", "Conv2D", "CosineHead", "FeatureNorm", "InputStandardization"]
