"""The reference: sort the pairs by expert with torch, run each expert on its rows, put the rows back.

Independent of the package's own layouts and products on purpose: every other backend is compared with it.
What it saves for the backward pass depends on the experts that were hit, so under activation checkpointing both
passes must route alike; the other backends save the same number of tensors whatever the routing.
Quantized weights are dequantized, an expert that is hit at a time, and multiplied in float32; activations are never
quantized here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.combine import attach
from routed_experts.mlp import expert_mlp
from routed_experts.quantization.stacks import stack_of
from routed_experts.weights import ExpertWeights


def run(experts: ExpertWeights, x_SH: Tensor, expert_S: Tensor) -> Tensor:
    """Run every pair through its expert; pairs whose expert is -1 read 0."""
    order = torch.argsort(expert_S, stable=True)
    hit, counts = torch.unique_consecutive(expert_S[order], return_counts=True)
    parameters = (experts.up_weight, experts.up_bias, experts.down_weight, experts.down_proj_bias)
    if not (hit >= 0).any():
        return attach(torch.zeros_like(x_SH), x_SH, *parameters)
    if experts.quantization is not None:
        return _run_quantized(experts, x_SH[order], hit.tolist(), counts.tolist())[torch.argsort(order)]
    # unbind is one autograd node for all experts; indexing would make a full-size gradient for each.
    matrices = [None if p is None else p.unbind() for p in parameters]
    pieces = []
    for e, x in zip(hit.tolist(), x_SH[order].split(counts.tolist()), strict=True):
        if e < 0:
            pieces.append(torch.zeros_like(x))
            continue
        up, up_bias, down, down_bias = (None if m is None else m[e] for m in matrices)
        linear = partial(_linear, experts.is_transposed)
        pieces.append(expert_mlp(experts, x, partial(linear, up, up_bias), partial(linear, down, down_bias)))
    return torch.cat(pieces)[torch.argsort(order)]


def _run_quantized(experts: ExpertWeights, x_SH: Tensor, hit: list[int], counts: list[int]) -> Tensor:
    """Run sorted rows, ``counts`` of them for every expert that is ``hit``."""
    stacks = stack_of(experts, True), stack_of(experts, False)
    biases = experts.up_bias, experts.down_proj_bias

    def product(e: int, x: Tensor, is_down: bool) -> Tensor:
        bias = biases[is_down]
        matrix = stacks[is_down].values(e)
        return _linear(experts.is_transposed, matrix, None if bias is None else bias[e], x.float()).to(x.dtype)

    pieces = [
        torch.zeros_like(x)
        if e < 0
        else expert_mlp(experts, x, partial(product, e, is_down=False), partial(product, e, is_down=True))
        for e, x in zip(hit, x_SH.split(counts), strict=True)
    ]
    return torch.cat(pieces)


def _linear(is_transposed: bool, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    matrix = weight if is_transposed else weight.mT
    out = x @ matrix.to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


BACKEND = Backend(
    rows=(
        (
            Spec(
                name="eager",
                takes="slots",
                gives="slots",
                requires=({"kind": "not_capturing"},),
                cost={
                    "cpu": Cost(call_us=120, expert_us=18, bytes_per_us=25e3, flops_per_us=2e5),
                    "cuda": Cost(call_us=600, expert_us=52, bytes_per_us=4e6, flops_per_us=5.5e8),
                },
            ),
            run,
        ),
    )
)
