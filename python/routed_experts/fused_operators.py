"""The fused kernels as operators, for torch.compile: opaque, with fakes; eager calls do not pass through here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts.compiled import declared, experts_of, is_transposed
from routed_experts.gates import apply_gate
from routed_experts.weights import TENSOR_NAMES, ExpertWeights


def traced(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor, *, in_one: bool) -> Tensor:
    """Put a fused call into the graph that is being traced; a gate or norm of one's own is traced between operators."""
    ops, tensors, text = torch.ops.routed_experts, experts.tensors(), declared(experts)
    if in_one:
        return ops.fused(x, ids, weights, tensors, text)
    a = apply_gate(experts, ops.fused_up(x, ids, tensors, text))
    slots = ops.fused_down(a, ids, tensors, text)
    if experts.post_expert_norm is not None:
        slots = experts.post_expert_norm(slots)
    return ops.fused_weigh(slots, ids, weights, tensors, text)


# Triton is an optional package: the bodies import it when they run.


@torch.library.custom_op("routed_experts::fused", mutates_args=())
def _fused(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    from routed_experts.kernels.fused import run_fused

    return run_fused(experts_of(tensors, text), x, ids, weights)


@torch.library.custom_op("routed_experts::fused_up", mutates_args=())
def _fused_up(x: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    from routed_experts.kernels.steps import up_rows

    return up_rows(experts_of(tensors, text), x, ids)


@torch.library.custom_op("routed_experts::fused_down", mutates_args=())
def _fused_down(a: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    from routed_experts.kernels.steps import down_rows

    return down_rows(experts_of(tensors, text), a, ids)


@torch.library.custom_op("routed_experts::fused_weigh", mutates_args=())
def _fused_weigh(slots: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    from routed_experts.kernels.steps import weigh_rows

    return weigh_rows(experts_of(tensors, text), slots, ids, weights)


@_fused.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@_fused_up.register_fake
def _(x: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    gated, ungated, *_ = tensors
    return x.new_empty(ids.numel(), _columns(ungated if gated is None else gated, text))


@_fused_down.register_fake
def _(a: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    return a.new_empty(ids.numel(), _columns(tensors[TENSOR_NAMES.index("down_proj")], text))


@_fused_weigh.register_fake
def _(slots: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return slots.new_empty(ids.shape[0], slots.shape[1])


def _columns(weight: Tensor | None, text: str) -> int:
    """Columns of the product with a weight; fakes hold no memory, so the checks of real weights cannot run."""
    assert weight is not None
    return weight.shape[2 if is_transposed(text) else 1]
