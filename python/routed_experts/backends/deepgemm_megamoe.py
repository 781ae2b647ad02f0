"""`deepgemm_megamoe`: experts and exchange in one kernel. Its requirements only: not in this version."""

from __future__ import annotations

from .not_yet import refuse
from .spec import Backend, Spec

_MODULE = (
    {"kind": "gated"},
    {"kind": "not_transposed"},
    {"kind": "concatenated"},
    {"kind": "no_bias"},
    {"kind": "no_post_expert_norm"},
    {"kind": "no_own_gate"},
    {"kind": "activation", "any_of": ["silu"]},
    # A clamp is an argument of the kernel; a slope is not.
    {"kind": "no_swiglu_alpha"},
    {"kind": "no_gradient"},
    {"kind": "process_group"},
    {"kind": "dtype", "any_of": ["bfloat16"]},
    {"kind": "quantization", "any_of": ["mxfp4"]},
    {"kind": "scales", "any_of": [("mxfp4", "ue8m0")]},
    {"kind": "dynamic_activation_scales"},
    {"kind": "multiple_of", "n": 128, "dims": ["hidden_size", "intermediate_size"]},
    {"kind": "single_device"},
)

_MACHINE = (
    {"kind": "not_in_this_version"},
    {"kind": "torch", "min": "2.9"},
    {"kind": "any_package", "any_of": ["kernels", "deep_gemm"]},
    {"kind": "capability_major", "any_of": [10]},
    {"kind": "toolkit"},
    {"kind": "nvcc"},
    {"kind": "toolkit_version", "rows": [{"major": 10, "min": "12.9"}]},
)

# Never chosen by auto: it replaces the stored weights, and every rank must call it.
BACKEND = Backend(
    rows=(
        (
            Spec(name="deepgemm_megamoe", devices=("cuda",), requires=(*_MODULE, *_MACHINE), auto=False),
            refuse,
        ),
    )
)
