"""Every rank holds the whole batch and runs its own experts on it; the outputs are summed.

No token moves and nothing is read by the host, so a CUDA graph can capture it. A rank's ids are those of its own
experts, and its count for all others: the sentinel that every experts function under expert parallelism knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.parallel.link import Link

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]  # (R, H), local ids (R, K), weights (R, K) -> (R, H)


def run_all_reduce(
    link: Link, compute: Compute, share: int, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the whole batch, the same on all ranks, over ``share`` experts a rank: (T, H), the same bits on all ranks."""
    if torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad):
        x_TH, weights_TK = _Shared.apply(link, x_TH, weights_TK)
    local_TK = local_ids(index_TK, link.rank, share)
    out = compute(x_TH, local_TK, weights_TK.masked_fill(local_TK == share, 0))
    return _Summed.apply(link, out) if out.requires_grad else _sum(link, out)


def local_ids(index_TK: Tensor, rank: int, share: int) -> Tensor:
    """Return local ids of the experts of ``rank``, and ``share`` for those of others and of nobody."""
    local = index_TK.long() - rank * share
    return local.masked_fill((local < 0) | (local >= share), share)


def _sum(link: Link, tensor: Tensor) -> Tensor:
    """Sum in float32 or wider, as slots are summed within a rank."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    return link.sum(wide.contiguous()).to(tensor.dtype)


class _Shared(torch.autograd.Function):
    """Inputs that all ranks hold: each rank's gradient is that of its own experts, so the backward sums them."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.link = link
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        return None, _sum(ctx.link, grad_x), _sum(ctx.link, grad_weights)


class _Summed(torch.autograd.Function):
    """The sum over ranks, which all ranks go on from alike: its gradient is every rank's own."""

    @staticmethod
    def forward(ctx: Any, link: Link, partial: Tensor) -> Tensor:
        return _sum(link, partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad
