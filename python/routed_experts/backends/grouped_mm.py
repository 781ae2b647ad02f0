"""Rows sorted by expert, one grouped product for each projection.

Two ways to the same numbers: torch's grouped GEMM where it takes the dtype, the strides and the device, and a
loop over the groups everywhere else (and on CPUs wherever the loop is the cheaper one: torch's kernel is a loop
there too).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.layout import ExpertLayout
from routed_experts.linear import grouped_linear
from routed_experts.mlp import expert_mlp
from routed_experts.weights import ExpertWeights


def run(experts: ExpertWeights, x_SH: Tensor, layout: ExpertLayout, *, kernel: str) -> Tensor:
    """Run the sorted rows through their experts; rows of sentinels read 0 before the norm."""
    offsets, transposed = layout.offsets, experts.is_transposed
    return expert_mlp(
        experts,
        x_SH,
        lambda x: grouped_linear(x, experts.up_weight, experts.up_bias, offsets, transposed, kernel),
        lambda x: grouped_linear(x, experts.down_weight, experts.down_proj_bias, offsets, transposed, kernel),
    )


_TORCH = Spec(
    name="grouped_mm",
    path="torch",
    takes="grouped",
    gives="rows",
    requires=(
        {"kind": "weights_aligned", "bytes": 16},
        {"kind": "dtype", "any_of": ["bfloat16"]},
    ),
    cost={
        "cpu": Cost(call_us=70, expert_us=6, bytes_per_us=25e3, flops_per_us=2e5),
        "cuda": Cost(call_us=250, bytes_per_us=2.5e6, flops_per_us=4e8),
    },
)
_LOOP = Spec(
    name="grouped_mm",
    path="loop",
    takes="grouped",
    gives="rows",
    cost={
        "cpu": Cost(call_us=60, expert_us=4, bytes_per_us=25e3, flops_per_us=2e5),
        "cuda": Cost(call_us=350, expert_us=40, bytes_per_us=2.5e6, flops_per_us=3e8),
    },
)
BACKEND = Backend(rows=((_TORCH, partial(run, kernel="torch")), (_LOOP, partial(run, kernel="loop"))))
