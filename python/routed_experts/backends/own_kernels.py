"""What our own kernels on CUDA ask for."""

from __future__ import annotations

from routed_experts.backends.spec import Requirement
from routed_experts.quantization.formats import FORMATS

OWN_KERNELS: tuple[Requirement, ...] = (
    {"kind": "capability", "min": (8, 0)},
    {"kind": "package", "name": "triton", "min": "3.3"},
    {"kind": "c_compiler"},
    # What the kernels that sort hold in registers; kernels/layout.py.
    {"kind": "at_most", "n": 4096, "dims": ["num_experts"]},
)
# Products of quantized matrices alone, kernels/stack_product.py: of others torch has its own.
QUANTIZED_PRODUCTS: tuple[Requirement, ...] = (
    {"kind": "quantization", "any_of": list(FORMATS)},
    {"kind": "dtype", "any_of": ["float32", "bfloat16", "float16"]},
    *OWN_KERNELS,
)
