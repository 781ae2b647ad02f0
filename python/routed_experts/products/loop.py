"""A product for each group of rows; works for every dtype, stride and device, and reads the offsets on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Matrices(Protocol):
    """Matrices of experts, read one at a time: a tensor (E, A, B), or what stands for one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, A, B)."""

    def __getitem__(self, expert: int, /) -> Tensor: ...


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, end row) of every expert, idle ones too. Reads the offsets on the host."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, start, end
        start = end


def linear(
    x: Tensor, weight: Tensor | Matrices, bias: Tensor | None, offsets: Tensor, transposed: bool, clean: bool
) -> Tensor:
    """Sorted rows times their experts' matrices: (S, D) -> (S, N)."""
    out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    end = 0
    for expert, start, end in _groups(offsets):
        if end == start:
            continue
        matrix = (weight[expert] if transposed else weight[expert].mT).to(x.dtype)
        if bias is None:
            torch.mm(x[start:end], matrix, out=out[start:end])
        else:
            torch.addmm(bias[expert].to(x.dtype), x[start:end], matrix, out=out[start:end])
    if clean:
        out[end:].zero_()
    return out


def weight_grad(x: Tensor, grad: Tensor, offsets: Tensor, transposed: bool, weight: Tensor) -> Tensor:
    """Sum of each expert's outer products, in the weight's strides and dtype; exactly 0 for idle experts."""
    left, right = (x, grad) if transposed else (grad, x)
    out = torch.empty_like(weight)
    for expert, start, end in _groups(offsets):
        if end == start:
            out[expert].zero_()
        else:
            out[expert].copy_(left[start:end].mT @ right[start:end])
    return out


def bias_grad(grad: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
    """Sum of each expert's rows, (E, N)."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    sums = [grad[start:end].sum(0, dtype=wide) for _, start, end in _groups(offsets)]
    return torch.stack(sums).to(bias.dtype)
