"""`sonicmoe`: SonicMoE's fused kernels. Requirements only: not in this version."""

from __future__ import annotations

from .not_yet import refuse
from .spec import Backend, Requirement, Spec

_MACHINE = (
    {"kind": "not_in_this_version"},
    {"kind": "any_package", "any_of": ["kernels", "sonicmoe"]},
    {"kind": "capability", "min": (9, 0)},
    {"kind": "package", "name": "nvidia-cutlass-dsl", "min": "4.6.0"},
    {"kind": "package", "name": "apache-tvm-ffi", "min": "0.1.10"},
    {"kind": "python", "min": "3.12"},
)


def _requires(*activations: str) -> tuple[Requirement, ...]:
    return (
        {"kind": "gated"},
        {"kind": "no_post_expert_norm"},
        {"kind": "no_own_gate"},
        {"kind": "activation", "any_of": list(activations)},
        {"kind": "no_swiglu_limit"},
        {"kind": "no_swiglu_alpha"},
        {"kind": "dtype", "any_of": ["bfloat16"]},
        {"kind": "unquantized"},
        *_MACHINE,
    )


# The kernel's GELU is the tanh approximation: exact gelu is run only for those who ask by name.
# No cost until there is code to measure.
BACKEND = Backend(
    rows=(
        (Spec(name="sonicmoe", devices=("cuda",), requires=_requires("silu", "gelu_tanh", "relu")), refuse),
        (
            Spec(
                name="sonicmoe",
                path="approximate-gelu",
                devices=("cuda",),
                requires=_requires("gelu"),
                auto=False,
            ),
            refuse,
        ),
    )
)
