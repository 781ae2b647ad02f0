"""One matrix product per (token, slot) pair, over copies of the expert's matrices.

Costs a copy of an expert's weights for every pair, in chunks under ROUTED_EXPERTS_BATCHED_BYTES; in exchange
there is no sort and no shape that depends on the routing. Made for few tokens on an accelerator. Copies of quantized
weights are dequantized ones.
"""

from __future__ import annotations

from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.linear import down_product, up_product
from routed_experts.mlp import expert_mlp
from routed_experts.weights import ExpertWeights


def run(experts: ExpertWeights, x_SH: Tensor, expert_S: Tensor) -> Tensor:
    """Run every pair through its expert; pairs whose expert is -1 read 0 before the norm."""
    return expert_mlp(
        experts,
        x_SH,
        lambda x: up_product(experts, x, expert_S, "copies"),
        lambda a: down_product(experts, a, expert_S, "copies"),
    )


BACKEND = Backend(
    rows=(
        (
            Spec(
                name="batched_mm",
                takes="slots",
                gives="slots",
                requires=({"kind": "dynamic_activation_scales"},),
                cost={
                    "cpu": Cost(call_us=90, bytes_per_us=3e3, flops_per_us=1e4, copies_weights=True),
                    "cuda": Cost(call_us=430, bytes_per_us=1.75e6, flops_per_us=1e8, copies_weights=True),
                },
            ),
            run,
        ),
    )
)
