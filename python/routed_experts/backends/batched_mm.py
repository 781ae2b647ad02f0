"""One matrix product per (token, slot) pair, over copies of the expert's matrices.

Costs a copy of an expert's weights for every pair, in chunks under ROUTED_EXPERTS_BATCHED_BYTES; in exchange
there is no sort and no shape that depends on the routing. Made for few tokens on an accelerator. Copies of quantized
weights are dequantized ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from routed_experts.backends.own_kernels import QUANTIZED_PRODUCTS
from routed_experts.backends.spec import Backend, Cost, Requirement, Spec
from routed_experts.linear import down_product, up_product
from routed_experts.mlp import expert_mlp
from routed_experts.weights import ExpertWeights


def run(experts: ExpertWeights, x_SH: Tensor, expert_S: Tensor, *, way: str) -> Tensor:
    """Run every pair through its expert; pairs whose expert is -1 read 0 before the norm."""
    return expert_mlp(
        experts,
        x_SH,
        lambda x: up_product(experts, x, expert_S, way),
        lambda a: down_product(experts, a, expert_S, way),
    )


def _row(path: str, way: str, cost: dict[str, Cost], *requires: Requirement) -> tuple[Spec, Callable[..., Tensor]]:
    spec = Spec(
        name="batched_mm",
        path=path,
        devices=tuple(cost),
        takes="slots",
        gives="slots",
        requires=({"kind": "dynamic_activation_scales"}, *requires),
        cost=cost,
    )
    return spec, partial(run, way=way)


BACKEND = Backend(
    rows=(
        _row(
            "",
            "copies",
            {
                "cpu": Cost(call_us=90, bytes_per_us=3e3, flops_per_us=1e4, copies_weights=True),
                "cuda": Cost(call_us=430, captured_us=35, bytes_per_us=1.75e6, flops_per_us=1e8, copies_weights=True),
            },
        ),
        _row(
            "triton",
            "triton by row",
            {"cuda": Cost(call_us=300, bytes_per_us=3.5e6, flops_per_us=1e8)},
            *QUANTIZED_PRODUCTS,
        ),
    )
)
