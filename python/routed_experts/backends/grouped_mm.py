"""Rows sorted by expert, one grouped product for each projection.

Two ways to the same numbers: torch's grouped GEMM where it takes the dtype, the strides and the device, and a
loop over the groups everywhere else (and on CPUs wherever the loop is the cheaper one: torch's kernel is a loop
there too). Quantized weights go through the loop, which dequantizes an expert at a time.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Requirement, Spec
from routed_experts.layout import ExpertLayout
from routed_experts.linear import down_product, up_product
from routed_experts.mlp import expert_mlp
from routed_experts.weights import ExpertWeights


def run(experts: ExpertWeights, x_SH: Tensor, layout: ExpertLayout, *, way: str) -> Tensor:
    """Run the sorted rows through their experts; rows of sentinels read 0 before the norm."""
    offsets = layout.offsets
    return expert_mlp(
        experts,
        x_SH,
        lambda x: up_product(experts, x, offsets, way),
        lambda a: down_product(experts, a, offsets, way),
    )


_PLAIN = {"kind": "unquantized"}
_ALIGNED = {"kind": "weights_aligned", "bytes": 16}
_HALVES_AND_FLOAT = {"kind": "dtype", "any_of": ["float32", "bfloat16", "float16"]}

# Where torch's grouped GEMM is a kernel and not a loop that waits for the offsets: SM90 and SM100.
_TORCH_ON_CUDA = (
    _PLAIN,
    _ALIGNED,
    {"kind": "dtype", "any_of": ["bfloat16"]},
    {"kind": "when", "major": 8, "then": {"kind": "not_capturing"}},
    {"kind": "when", "major": 12, "then": {"kind": "not_capturing"}},
    {
        "kind": "torch_capability",
        "rows": [
            {"torch_min": "2.8", "torch_below": "2.9", "capability_min": (9, 0), "capability_below": (10, 0)},
            {
                "torch_min": "2.9",
                "torch_below": "2.10",
                "capability_min": (8, 0),
                "capability_below": (12, 0),
            },
            {"torch_min": "2.10", "capability_min": (8, 0)},
        ],
    },
)


def _row(path: str, device: str, cost: Cost, *requires: Requirement) -> tuple[Spec, partial[Tensor]]:
    spec = Spec(
        name="grouped_mm",
        path=path,
        devices=(device,),
        takes="grouped",
        gives="rows",
        requires=(*requires, {"kind": "dynamic_activation_scales"}),
        cost={device: cost},
        decode_as="batched_mm",
    )
    return spec, partial(run, way=path)


BACKEND = Backend(
    rows=(
        _row(
            "torch",
            "cpu",
            Cost(call_us=70, expert_us=6, bytes_per_us=25e3, flops_per_us=2e5),
            _PLAIN,
            _ALIGNED,
            _HALVES_AND_FLOAT,
            {"kind": "torch", "min": "2.9"},
        ),
        _row("torch", "cuda", Cost(call_us=650, bytes_per_us=3.8e6, flops_per_us=4.5e8), *_TORCH_ON_CUDA),
        _row("loop", "cpu", Cost(call_us=60, expert_us=4, bytes_per_us=25e3, flops_per_us=2e5)),
        _row(
            "loop",
            "cuda",
            Cost(call_us=650, expert_us=34, bytes_per_us=4e6, flops_per_us=5.5e8),
            {"kind": "not_capturing"},
        ),
    )
)
