"""Dispatch and combine: from tokens to rows and back, with one frozen object between them.

T tokens, K slots a token, S = T*K pairs, R rows, H hidden size. Rows are what a backend works on; a
:class:`Routes` says which pair each row came from and which row each pair became. Every sum over slots runs in
slot order in float32, with no atomics in either direction, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.layout import ExpertLayout


class Routes(NamedTuple):
    """The way from pairs to rows and back; ``None`` stands for the identity (rows in pair order)."""

    valid_TK: Tensor  # bool: the pair has an expert here
    source_R: Tensor | None  # row -> pair; -1 on padding
    position_TK: Tensor | None  # pair -> row; out of range never: invalid pairs point at some row
    clean: bool  # every pair is valid, known without asking the device


def pair_routes(index_TK: Tensor, num_experts: int) -> Routes:
    """Rows in pair order."""
    expert = index_TK.long()  # torch compares no unsigned integers above 8 bits
    valid = (expert >= 0) & (expert < num_experts)
    return Routes(valid, None, None, _all_true(valid))


def sorted_routes(layout: ExpertLayout, shape: Sequence[int]) -> Routes:
    """Rows sorted by expert, sentinels last."""
    position = layout.inverse.view(shape)
    valid = position < layout.rows
    return Routes(valid, layout.order, position, _all_true(valid))


def padded_routes(layout: ExpertLayout, shape: Sequence[int]) -> Routes:
    """Rows sorted by expert, each expert's rows from its ``starts`` on; the rest is padding."""
    assert layout.starts is not None
    assert layout.row_expert is not None
    pairs, rows = shape[0] * shape[1], layout.row_expert.shape[0]
    sorted_row = torch.arange(pairs, dtype=torch.int32, device=layout.order.device)
    expert = torch.searchsorted(layout.offsets, sorted_row, right=True).clamp_(max=layout.counts.shape[0] - 1)
    shift = layout.starts[:-1] - (layout.offsets - layout.counts)
    owned = sorted_row < layout.rows
    # A row past the end collects the sentinels and is cut off, so no shape depends on the routing.
    padded_row = torch.where(owned, sorted_row + shift[expert], rows)
    source = torch.full((rows + 1,), -1, dtype=torch.int32, device=layout.order.device)
    source = source.index_copy(0, padded_row.long(), layout.order)[:rows]
    position = padded_row[layout.inverse.long()].view(shape)
    valid = position < rows
    return Routes(valid, source, position.clamp(max=max(rows - 1, 0)), False)


def _all_true(valid: Tensor) -> bool:
    return valid.device.type == "cpu" and not torch.compiler.is_compiling() and bool(valid.all())


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to hear of an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def dispatch(x_TH: Tensor, routes: Routes) -> Tensor:
    """Gather the rows (R, H) of a call; padding rows read 0. Gradients sum over slots in float32."""
    return _Dispatch.apply(x_TH, *routes) if wants_grad(x_TH) else _gather(x_TH, *routes)


def combine(rows_RH: Tensor, weights_TK: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
    """Weight the rows and sum over slots in float32, in slot order: (T, H) in ``dtype``.

    Pairs without an expert contribute exactly 0, whatever their weight or row holds, and get gradient 0.
    """
    if wants_grad(rows_RH, weights_TK):
        return _Combine.apply(rows_RH, weights_TK, *routes, dtype)
    return _weigh(rows_RH, _scale(rows_RH, weights_TK, routes), routes, dtype)


def _gather(x: Tensor, valid: Tensor, source: Tensor | None, position: Tensor | None, clean: bool) -> Tensor:
    rows = _spread(x, None, source, valid.shape[1])
    return rows if clean else rows.masked_fill(~_row_is_owned(valid, source), 0)


def _scale(rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """The weights in the dtype of the sum, 0 where the pair has no expert (0 times NaN would be NaN)."""
    scale = weights.to(torch.promote_types(rows.dtype, torch.float32))
    return scale if routes.clean else scale.masked_fill(~routes.valid_TK, 0)


def _weigh(rows: Tensor, scale: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
    valid = None if routes.clean else routes.valid_TK
    return _sum_slots(rows, routes.position_TK, valid, scale, routes.valid_TK.shape).to(dtype)


def _slot(rows: Tensor, position: Tensor | None, valid: Tensor | None, slot: int, shape: Sequence[int]) -> Tensor:
    """Rows of one slot, (T, H); 0 where the pair has no expert."""
    if position is not None:
        taken = rows.index_select(0, position[:, slot])
    else:  # a view, no gather
        taken = rows.view(*shape, rows.shape[-1])[:, slot]
    return taken if valid is None else taken.masked_fill(~valid[:, slot, None], 0)


def _sum_slots(
    rows: Tensor, position: Tensor | None, valid: Tensor | None, weights: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Sum over slots of (weighted) rows, in float32 or wider, in slot order."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(shape[0], rows.shape[-1], dtype=wide)
    for slot in range(shape[1]):
        taken = _slot(rows, position, valid, slot, shape)
        if weights is None:
            total += taken
        else:
            total.addcmul_(taken, weights[:, slot, None])
    return total


def _spread(grad_TH: Tensor, weights: Tensor | None, source: Tensor | None, slots: int) -> Tensor:
    """Each row's token gradient times its pair's weight, in float32 or wider: (R, H)."""
    if source is None:
        rows = grad_TH[:, None, :].expand(-1, slots, -1)
        rows = rows if weights is None else rows * weights[..., None]
        return rows.reshape(-1, grad_TH.shape[-1])
    pair = source.clamp(min=0)
    rows = grad_TH.index_select(0, pair // slots)
    return rows if weights is None else rows * weights.reshape(-1).index_select(0, pair)[:, None]


def _row_is_owned(valid: Tensor, source: Tensor | None) -> Tensor:
    """(R, 1) bool: the row belongs to a pair that has an expert."""
    if source is None:
        return valid.reshape(-1, 1)
    return (valid.reshape(-1).index_select(0, source.clamp(min=0)) & (source >= 0))[:, None]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, valid: Tensor, source: Tensor | None, position: Tensor | None, clean: bool
    ) -> Tensor:
        ctx.save_for_backward(valid, position)
        ctx.clean, ctx.dtype = clean, x.dtype
        return _gather(x, valid, source, position, clean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        valid, position = ctx.saved_tensors
        total = _sum_slots(grad.contiguous(), position, None if ctx.clean else valid, None, valid.shape)
        return total.to(ctx.dtype), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        valid: Tensor,
        source: Tensor | None,
        position: Tensor | None,
        clean: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        routes = Routes(valid, source, position, clean)
        scale = _scale(rows, weights, routes)
        ctx.save_for_backward(rows, scale, valid, source, position)
        ctx.clean, ctx.weights_dtype = clean, weights.dtype
        return _weigh(rows, scale, routes, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, valid, source, position = ctx.saved_tensors
        shape = valid.shape
        grad_rows = grad_weights = None
        grad = grad.to(scale.dtype)
        if ctx.needs_input_grad[0]:
            grad_rows = _spread(grad, scale, source, shape[1])
            if not ctx.clean:
                grad_rows = grad_rows.masked_fill(~_row_is_owned(valid, source), 0)
            grad_rows = grad_rows.to(rows.dtype)
        if ctx.needs_input_grad[1]:
            slots = [
                (_slot(rows, position, None if ctx.clean else valid, slot, shape) * grad).sum(-1)
                for slot in range(shape[1])
            ]
            grad_weights = torch.stack(slots, dim=1) if slots else scale.new_zeros(shape)
            grad_weights = grad_weights.to(ctx.weights_dtype)
        return grad_rows, grad_weights, None, None, None, None, None


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad, *zeros


def attach(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return ``out`` as a function of ``inputs`` with gradient 0: a call that used none of them stays in the graph."""
    if not wants_grad(*inputs):
        return out
    return _ZeroGradient.apply(out, *(t for t in inputs if t is not None and t.requires_grad))
