"""FP8 and FP4 weights: their formats, and the exact reference that quantizes and dequantizes them.

Every stored scale is the *inverse* scale, the number that a stored value is multiplied by, in spite of the names
(``weight_scale_inv``) that checkpoints give it. docs/quantization.md has the formats and their shapes.
"""

from routed_experts.quantization.activations import quantize_activations, quantize_activations_static
from routed_experts.quantization.formats import FORMATS, Quantization
from routed_experts.quantization.reference import dequantize, quantize

__all__ = [
    "FORMATS",
    "Quantization",
    "dequantize",
    "quantize",
    "quantize_activations",
    "quantize_activations_static",
]
