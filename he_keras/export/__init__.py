"""Export for serving: SavedModels with a model card, and LiteRT and ONNX files next to them."""

from he_keras.export.calibration import Calibration, calibrate
from he_keras.export.conversions import FORMATS, ConversionPlan
from he_keras.export.image_files import RESIZES
from he_keras.export.model_card import Provenance
from he_keras.export.robustbench import export_robustbench
from he_keras.export.saved_model import export_saved_model

__all__ = [
    "FORMATS",
    "RESIZES",
    "Calibration",
    "ConversionPlan",
    "Provenance",
    "calibrate",
    "export_robustbench",
    "export_saved_model",
]
