"""Layers: the hypersphere-embedding head, its normalisation, and the networks' own layers."""

import keras
from keras.layers import Conv2D

from he_keras.layers.batch_norm import BatchNormalization
from he_keras.layers.cosine_head import CosineHead
from he_keras.layers.feature_norm import FeatureNorm
from he_keras.layers.input_standardization import InputStandardization

# Models that earlier versions saved name a class of ours, which had Keras's values and weights.
keras.saving.get_custom_objects()["he_keras>Conv2D"] = Conv2D

__all__ = ["BatchNormalization", "Conv2D", "CosineHead", "FeatureNorm", "InputStandardization"]
