"""Rows on their way between ranks, as autograd functions: what goes out in the forward comes back in the backward.

A trip is two functions, so that computing goes on in between: one starts it, one waits for it. The backward of the
second starts the transposed trip and that of the first waits for it. Both always move every tensor of the trip, wanted
or not, so that ranks whose inputs differ in ``requires_grad`` still make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.combine import take_rows
from routed_experts.parallel.link import Link


class Trip:
    """Tensors with one row axis each, on their way together: ``send`` rows to every rank, ``receive`` from each."""

    def __init__(self, link: Link, send: Sequence[int], receive: Sequence[int], differentiable: bool) -> None:
        self.link, self.send, self.receive = link, list(send), list(receive)
        self.differentiable = differentiable
        self._works: list[Any] = []
        self._pending: tuple[Tensor, ...] = ()
        self.returning: tuple[Tensor, ...] = ()  # gradients on their way back

    def start(self, *tensors: Tensor) -> None:
        """Begin to send; the tensors have ``sum(send)`` rows."""
        if not self.differentiable:
            self._pending = self.begin(tensors, False)
            return
        first, *others = tensors
        if not any(tensor.requires_grad for tensor in tensors):
            first = first.detach().requires_grad_()  # other ranks want gradients, and this one has part in them
        self._pending = _Start.apply(self, first, *others)

    def finish(self) -> tuple[Tensor, ...]:
        """Return what arrived, ``sum(receive)`` rows."""
        pending, self._pending = self._pending, ()
        if self.differentiable:
            return _Finish.apply(self, *pending)
        self.end()
        return pending

    def begin(self, tensors: Sequence[Tensor], is_back: bool) -> tuple[Tensor, ...]:
        """Start every tensor, forth or back; the results may be read after ``end``."""
        out_splits, in_splits = (self.send, self.receive) if is_back else (self.receive, self.send)
        outs, works = [], []
        for tensor in tensors:
            rows = tensor.contiguous()
            out = rows.new_empty((sum(out_splits), *rows.shape[1:]))
            works.append((self.link.start(out, rows, out_splits, in_splits), rows))
            outs.append(out)
        self._works = works
        return tuple(outs)

    def end(self) -> None:
        """Wait for what ``begin`` started."""
        works, self._works = self._works, []
        for work, rows in works:
            self.link.finish(work, rows.is_cpu)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return trip.begin(tensors, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *marks: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.end()
        returned, ctx.trip.returning = ctx.trip.returning, ()
        return None, *returned


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, *pending: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        trip.end()
        return tuple(t.view_as(t) for t in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.returning = ctx.trip.begin(grads, True)
        # Under way they have the rows of the other end; autograd is handed marks of the shape that it expects.
        return None, *(grad.new_zeros(()).expand(grad.shape) for grad in grads)


def spread(x_TH: Tensor, source_R: Tensor, homes_TM: Tensor) -> Tensor:
    """Return every row's token, (R, H); the backward sums a token's rows in the order of ``homes_TM``."""
    return _Spread.apply(x_TH, source_R, homes_TM) if _wants(x_TH) else take_rows(x_TH, source_R)


def gather(rows_RH: Tensor, source_R: Tensor, homes_TM: Tensor) -> Tensor:
    """Sum every token's rows in float32, in the order of ``homes_TM``: (T, H); the backward is :func:`spread`."""
    return _Gather.apply(rows_RH, source_R, homes_TM) if _wants(rows_RH) else _sum_homes(rows_RH, homes_TM)


def deal(weights_TK: Tensor, pairs_RK: Tensor, place_TK: Tensor) -> Tensor:
    """Return the weights of every row's pairs, (R, K'), 0 where it has none; each pair has one place or none."""
    if _wants(weights_TK):
        return _Deal.apply(weights_TK, pairs_RK, place_TK)
    return take_or_zero(weights_TK, pairs_RK)


def take_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values.reshape(-1)[index]``, 0 where the index is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    taken = take_rows(values.reshape(-1), index.clamp(min=0).reshape(-1)).view(index.shape)
    return taken.masked_fill(index < 0, 0)


def _wants(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _sum_homes(rows_RH: Tensor, homes_TM: Tensor) -> Tensor:
    dtype = torch.promote_types(rows_RH.dtype, torch.float32)
    total = rows_RH.new_zeros((homes_TM.shape[0], rows_RH.shape[1]), dtype=dtype)
    if rows_RH.shape[0]:
        for home in homes_TM.unbind(1):
            total += take_rows(rows_RH, home.clamp(min=0)).masked_fill(home[:, None] < 0, 0)
    return total.to(rows_RH.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, homes: Tensor) -> Tensor:
        ctx.save_for_backward(homes)
        return take_rows(x, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_homes(grad.contiguous(), *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, homes: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return _sum_homes(rows, homes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return take_rows(grad.contiguous(), *ctx.saved_tensors), None, None


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, pairs: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return take_or_zero(weights, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return take_or_zero(grad.contiguous(), *ctx.saved_tensors), None, None
