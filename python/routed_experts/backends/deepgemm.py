"""`deepgemm`: grouped GEMM kernels of DeepGEMM. Requirements only: not in this version."""

from __future__ import annotations

from .not_yet import refuse
from .spec import Backend, Spec

_QUANTIZED = ["fp8_block", "mxfp4"]

_MODULE = (
    {"kind": "no_post_expert_norm"},
    {"kind": "no_gradient"},
    {"kind": "dtype", "any_of": ["bfloat16"]},
    {"kind": "quantization", "any_of": ["none", *_QUANTIZED]},
    {"kind": "dynamic_activation_scales"},
    {
        "kind": "when",
        "formats": ["fp8_block"],
        "then": {"kind": "block", "any_of": [(128, 128), (1, 128)]},
    },
    {"kind": "when", "formats": _QUANTIZED, "then": {"kind": "no_bias"}},
    # Hopper's FP8 instructions want both operands K-major.
    {"kind": "when", "major": 9, "formats": ["fp8_block"], "then": {"kind": "not_transposed"}},
    {
        "kind": "when",
        "major": 9,
        "then": {"kind": "scales", "any_of": [("fp8_block", "float32"), ("fp8_block", "ue8m0")]},
    },
    {
        "kind": "when",
        "major": 10,
        "then": {"kind": "scales", "any_of": [("fp8_block", "ue8m0"), ("mxfp4", "ue8m0")]},
    },
    # Function handles belong to the context that loaded them: another device computes garbage in silence.
    {"kind": "single_device"},
)

_MACHINE = (
    {"kind": "not_in_this_version"},
    {"kind": "any_package", "any_of": ["kernels", "deep_gemm"]},
    # 9 and 10 only: there is no build for SM110 and SM120.
    {"kind": "capability_major", "any_of": [9, 10]},
    {"kind": "toolkit"},
    {"kind": "nvcc"},
    {"kind": "toolkit_version", "rows": [{"major": 9, "min": "12.3"}, {"major": 10, "min": "12.9"}]},
)

# No cost until there is code to measure.
BACKEND = Backend(
    rows=(
        (
            Spec(
                name="deepgemm",
                devices=("cuda",),
                takes="padded",
                gives="rows",
                alignment=128,
                requires=(*_MODULE, *_MACHINE),
            ),
            refuse,
        ),
    )
)
