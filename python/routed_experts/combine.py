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
    exclusive: bool  # every pair has a row of its own, pairs without an expert too


def pair_routes(index_TK: Tensor, num_experts: int) -> Routes:
    """Rows in pair order."""
    expert = index_TK.long()  # torch compares no unsigned integers above 8 bits
    valid = (expert >= 0) & (expert < num_experts)
    return Routes(valid, None, None, _all_true(valid), True)


def sorted_routes(layout: ExpertLayout, shape: Sequence[int]) -> Routes:
    """Rows sorted by expert, sentinels last."""
    position = layout.inverse.view(shape)
    valid = position < layout.rows
    return Routes(valid, layout.order, position, _all_true(valid), True)


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
    return Routes(valid, source, position.clamp(max=max(rows - 1, 0)), False, False)


def _all_true(valid: Tensor) -> bool:
    return valid.device.type == "cpu" and not torch.compiler.is_compiling() and bool(valid.all())


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to hear of an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def dispatch(x_TH: Tensor, routes: Routes) -> Tensor:
    """Gather the rows (R, H) of a call; padding reads 0, a sentinel's row its token."""
    return _Dispatch.apply(x_TH, *routes) if wants_grad(x_TH) else _gather(x_TH, routes)


def combine(rows_RH: Tensor, weights_TK: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
    """Weight the rows and sum over slots in float32, in slot order: (T, H) in ``dtype``.

    Pairs without an expert contribute exactly 0, whatever their weight or row holds, and get gradient 0.
    """
    if wants_grad(rows_RH, weights_TK):
        return _Combine.apply(rows_RH, weights_TK, *routes, dtype)
    return _weigh(rows_RH, _scale(rows_RH, weights_TK, routes), routes, dtype)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``: index_select copies wide rows at a fraction of a GPU's bandwidth, and is the faster on a CPU."""
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]


def _gather(x: Tensor, routes: Routes) -> Tensor:
    rows = _spread(x, None, routes)
    return rows if routes.exclusive else _own(rows, routes)


def _own(rows: Tensor, routes: Routes) -> Tensor:
    """The rows, 0 where no pair with an expert owns one: 0 times NaN would be NaN."""
    if routes.clean:
        return rows
    valid, source = routes.valid_TK.reshape(-1), routes.source_R
    owned = valid if source is None else take_rows(valid, source.clamp(min=0)) & (source >= 0)
    return rows.masked_fill(~owned[:, None], 0)


def _scale(rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """The weights in the dtype of the sum, 0 where the pair has no expert."""
    scale = weights.to(torch.promote_types(rows.dtype, torch.float32))
    return scale if routes.clean else scale.masked_fill(~routes.valid_TK, 0)


def _weigh(rows: Tensor, scale: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
    return _sum_slots(_own(rows, routes), routes, scale).to(dtype)


def _slot(rows: Tensor, routes: Routes, slot: int) -> Tensor:
    """Rows of one slot, (T, H), of rows that were made 0 where nobody owns them."""
    if routes.position_TK is None:
        return rows.view(*routes.valid_TK.shape, rows.shape[-1])[:, slot]  # a view, no gather
    taken = take_rows(rows, routes.position_TK[:, slot])
    return taken if routes.exclusive else taken.masked_fill(~routes.valid_TK[:, slot, None], 0)


def _sum_slots(rows: Tensor, routes: Routes, scale_TK: Tensor) -> Tensor:
    """Sum the slots' rows times their scale, in float32 or wider, in slot order: (T, H)."""
    tokens, slots = routes.valid_TK.shape
    total = rows.new_zeros(tokens, rows.shape[-1], dtype=scale_TK.dtype)
    for slot in range(slots):
        total.addcmul_(_slot(rows, routes, slot), scale_TK[:, slot, None])
    return total


def _spread(x_TH: Tensor, scale_TK: Tensor | None, routes: Routes) -> Tensor:
    """Every row's token, times its pair's scale: (R, H)."""
    slots = routes.valid_TK.shape[1]
    if routes.source_R is None:
        rows = x_TH[:, None, :].expand(-1, slots, -1)
        rows = rows if scale_TK is None else rows * scale_TK[..., None]
        return rows.reshape(-1, x_TH.shape[-1])
    pair = routes.source_R.clamp(min=0)
    rows = take_rows(x_TH, pair // slots)
    return rows if scale_TK is None else rows * take_rows(scale_TK.reshape(-1), pair)[:, None]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        valid: Tensor,
        source: Tensor | None,
        position: Tensor | None,
        clean: bool,
        exclusive: bool,
    ) -> Tensor:
        ctx.save_for_backward(valid, source, position)
        ctx.known, ctx.dtype = (clean, exclusive), x.dtype
        return _gather(x, Routes(valid, source, position, clean, exclusive))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routes = Routes(*ctx.saved_tensors, *ctx.known)
        ones = routes.valid_TK.to(torch.promote_types(grad.dtype, torch.float32))
        return _weigh(grad.contiguous(), ones, routes, ctx.dtype), None, None, None, None, None


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
        exclusive: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        routes = Routes(valid, source, position, clean, exclusive)
        scale = _scale(rows, weights, routes)
        ctx.save_for_backward(rows, scale, valid, source, position)
        ctx.known, ctx.weights_dtype = (clean, exclusive), weights.dtype
        out = _weigh(rows, scale, routes, dtype)
        # torch 2.11 compiles gradients that are 0 where the result is a tensor that was changed in place or not cast.
        return out.clone() if torch.compiler.is_compiling() else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, *routing = ctx.saved_tensors
        routes = Routes(*routing, *ctx.known)
        grad_rows = grad_weights = None
        grad = grad.to(scale.dtype)
        if ctx.needs_input_grad[0]:
            grad_rows = _own(_spread(grad, scale, routes), routes).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            grad_weights = _weight_grad(rows, grad, routes).to(ctx.weights_dtype)
        return grad_rows, grad_weights, None, None, None, None, None, None


def _weight_grad(rows: Tensor, grad_TH: Tensor, routes: Routes) -> Tensor:
    """Each pair's row times its token's gradient, (T, K); 0 where the pair has no expert."""
    owned = _own(rows, routes)
    dots = [(_slot(owned, routes, slot) * grad_TH).sum(-1) for slot in range(routes.valid_TK.shape[1])]
    return torch.stack(dots, dim=1).masked_fill(~routes.valid_TK, 0)


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
