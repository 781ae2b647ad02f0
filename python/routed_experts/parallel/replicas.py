"""Ranks that hold the same tensor: each takes its part of the rows, and the parts become whole again.

The gradient of a whole tensor is whole on every rank: that of a part is gathered, that of gathered parts is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.parallel.link import Link


def take_part(link: Link, whole: Tensor) -> Tensor:
    """Return this rank's part of T rows: rows rank*P .. (rank+1)*P - 1 with P = T/W rounded up, the last ones fewer."""
    if torch.is_grad_enabled() and whole.requires_grad:
        return _TakePart.apply(whole, link)
    return _cut(link, whole)


def gather_parts(link: Link, part: Tensor, rows: int) -> Tensor:
    """Return the T ``rows`` whose parts the ranks hold."""
    if torch.is_grad_enabled() and part.requires_grad:
        return _GatherParts.apply(part, link, rows)
    return _join(link, part, rows)


def _part_rows(link: Link, rows: int) -> list[int]:
    most = -(-rows // link.world)
    return [min(most, max(rows - rank * most, 0)) for rank in range(link.world)]


def _cut(link: Link, whole: Tensor) -> Tensor:
    sizes = _part_rows(link, whole.shape[0])
    first = sum(sizes[: link.rank])
    return whole[first : first + sizes[link.rank]]


def _join(link: Link, part: Tensor, rows: int) -> Tensor:
    """Every rank gives its part to each: an exchange of uneven parts, with no padding."""
    sizes = _part_rows(link, rows)
    out = part.new_empty((rows, *part.shape[1:]))
    copies = part.repeat(link.world, *[1] * (part.dim() - 1))
    link.finish(link.start(out, copies, sizes, [part.shape[0]] * link.world), part.is_cpu)
    return out


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.rows = link, whole.shape[0]
        return _cut(link, whole).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _join(ctx.link, grad.contiguous(), ctx.rows), None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, link: Link, rows: int) -> Tensor:
        ctx.link = link
        return _join(link, part, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _cut(ctx.link, grad).contiguous(), None, None
