"""Products of rows with their experts' matrices, forward and backward, in three ways of doing it.

S rows, E experts, D the width of a row, N the width of a result. A weight is (E, N, D) and y = x @ W.T, or
(E, D, N) transposed and y = x @ W. Rows are sorted by expert (``offsets``) or carry their expert
(``expert_S``, -1 for none). Rows without an expert read 0, in results and in gradients. Weights whose dtype
differs from the rows' (autocast) are cast one expert or one chunk at a time, never as a whole.

Eager calls use autograd functions; compiled ones the same code as opaque operators, see compiled.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.facts import BATCHED_BYTES, batched_budget
from routed_experts.layout import build_layout

logger = logging.getLogger("routed_experts")


class GroupedKernel(NamedTuple):
    """One way to multiply sorted rows with their experts' matrices."""

    linear: Callable[[Tensor, Tensor, Tensor | None, Tensor, bool], Tensor]
    weight_grad: Callable[[Tensor, Tensor, Tensor, bool, Tensor], Tensor]
    bias_grad: Callable[[Tensor, Tensor, Tensor], Tensor]


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, end row) of every expert, idle ones too. Reads the offsets on the host."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, start, end
        start = end


def _as_product(matrix: Tensor, transposed: bool) -> Tensor:
    """The matrix in the orientation x @ M."""
    return matrix if transposed else matrix.mT


def _loop_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    end = 0
    for expert, start, end in _groups(offsets):
        if end == start:
            continue
        matrix = _as_product(weight[expert], transposed).to(x.dtype)
        if bias is None:
            torch.mm(x[start:end], matrix, out=out[start:end])
        else:
            torch.addmm(bias[expert].to(x.dtype), x[start:end], matrix, out=out[start:end])
    out[end:].zero_()
    return out


def _loop_weight_grad(x: Tensor, grad: Tensor, offsets: Tensor, transposed: bool, weight: Tensor) -> Tensor:
    left, right = (x, grad) if transposed else (grad, x)
    out = torch.empty_like(weight)
    for expert, start, end in _groups(offsets):
        if end == start:
            out[expert].zero_()
        else:
            out[expert].copy_(left[start:end].mT @ right[start:end])
    return out


def _loop_bias_grad(grad: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    sums = [grad[start:end].sum(0, dtype=wide) for _, start, end in _groups(offsets)]
    return torch.stack(sums).to(bias.dtype)


def _owned(offsets: Tensor, rows: int) -> Tensor:
    return (torch.arange(rows, device=offsets.device, dtype=torch.int32) < offsets[-1])[:, None]


def _row_expert(offsets: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets, row, right=True).clamp_(max=offsets.shape[0] - 1)


def _torch_grouped_mm(x: Tensor, matrix: Tensor, offsets: Tensor) -> Tensor:
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10 on
    return grouped_mm(x, matrix, offs=offsets)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool) -> Tensor:
    # A cast under autocast copies the stack, as autocast does for every linear layer.
    out = _torch_grouped_mm(x, _as_product(weight, transposed).to(x.dtype), offsets)
    if bias is not None:
        out = out + bias.to(x.dtype).index_select(0, _row_expert(offsets, x.shape[0]))
    # The kernel leaves rows past the last offset as they were in memory, NaN included.
    return out.masked_fill(~_owned(offsets, x.shape[0]), 0)


def _torch_weight_grad(x: Tensor, grad: Tensor, offsets: Tensor, transposed: bool, weight: Tensor) -> Tensor:
    left, right = (x, grad) if transposed else (grad, x)
    grad_weight = _torch_grouped_mm(left.mT, right, offsets)
    return torch.empty_like(weight).copy_(grad_weight)  # the parameter's own strides and dtype


def _torch_bias_grad(grad: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
    # A one-hot product sums in a fixed order and needs neither atomics nor the counts on the host.
    rows = grad.shape[0]
    expert = torch.arange(offsets.shape[0], device=offsets.device)[:, None]
    one_hot = (_row_expert(offsets, rows)[None, :] == expert) & _owned(offsets, rows)[None, :, 0]
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (one_hot.to(wide) @ grad.to(wide)).to(bias.dtype)


KERNELS = {
    "loop": GroupedKernel(_loop_linear, _loop_weight_grad, _loop_bias_grad),
    "torch": GroupedKernel(_torch_linear, _torch_weight_grad, _torch_bias_grad),
}


def grouped_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, kernel: str
) -> Tensor:
    """Rows sorted by expert times their experts' matrices: (S, D) -> (S, N)."""
    return KERNELS[kernel].linear(x.contiguous(), weight, bias, offsets, transposed)


def grouped_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    kernel: str,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of rows, weight and bias; ``needs`` says which are wanted."""
    ways = KERNELS[kernel]
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = ways.linear(grad, weight, None, offsets, not transposed) if needs[0] else None
    grad_weight = ways.weight_grad(x, grad, offsets, transposed, weight) if needs[1] else None
    grad_bias = ways.bias_grad(grad, offsets, bias) if needs[2] and bias is not None else None
    return grad_x, grad_weight, grad_bias


class GroupedLinear(torch.autograd.Function):
    """Autograd of :func:`grouped_forward`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        transposed: bool,
        kernel: str,
    ) -> Tensor:
        """See grouped_forward."""
        ctx.save_for_backward(x, weight, bias, offsets)
        ctx.transposed, ctx.kernel = transposed, kernel
        return grouped_forward(x, weight, bias, offsets, transposed, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See grouped_backward."""
        x, weight, bias, offsets = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        grads = grouped_backward(grad, x, weight, bias, offsets, ctx.transposed, ctx.kernel, needs)
        return *grads, None, None, None


@lru_cache(maxsize=256)
def _announce(pairs: int, matrix_bytes: int, chunk: int) -> None:
    logger.info(
        "batched_mm copies %d expert matrices of %.1f MiB: %.1f MiB in all, at most %.1f MiB at a time (%s)",
        pairs,
        matrix_bytes / 2**20,
        pairs * matrix_bytes / 2**20,
        min(pairs, chunk) * matrix_bytes / 2**20,
        BATCHED_BYTES,
    )


def _chunks(expert: Tensor, weight: Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of pairs whose copied matrices stay inside the budget, announced before anything is allocated."""
    matrix_bytes = weight.shape[1] * weight.shape[2] * torch.empty((), dtype=dtype).element_size()
    chunk, pairs = max(1, batched_budget() // matrix_bytes), expert.shape[0]
    _announce(pairs, matrix_bytes, chunk)
    return [(start, min(start + chunk, pairs)) for start in range(0, pairs, chunk)]


def _copies(weight: Tensor, expert: Tensor) -> Tensor:
    """One copy of its matrix for every pair; indexing copies large rows at full bandwidth, index_select does not."""
    return weight[expert]


def batched_forward(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool) -> Tensor:
    """Rows in any order, each times a copy of its expert's matrix: (S, D) -> (S, N)."""
    out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    safe = expert.clamp(min=0)
    for start, end in _chunks(expert, weight, x.dtype):
        copies = _copies(weight, safe[start:end]).to(x.dtype)
        matrices = copies.mT if transposed else copies
        torch.bmm(matrices, x[start:end, :, None], out=out[start:end, :, None])
    if bias is not None:
        out += bias.to(x.dtype).index_select(0, safe)
    return out.masked_fill_((expert < 0)[:, None], 0)


def batched_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of rows, weight and bias. The copies are made again, not kept; weights' are summed by group."""
    grad_x = batched_forward(grad, weight, None, expert, not transposed) if needs[0] else None
    if not (needs[1] or needs[2]):
        return grad_x, None, None
    layout = build_layout(expert[:, None], weight.shape[0])
    sorted_grad, sorted_x = grad.index_select(0, layout.order), x.index_select(0, layout.order)
    loop = KERNELS["loop"]
    grad_weight = loop.weight_grad(sorted_x, sorted_grad, layout.offsets, transposed, weight) if needs[1] else None
    grad_bias = loop.bias_grad(sorted_grad, layout.offsets, bias) if needs[2] and bias is not None else None
    return grad_x, grad_weight, grad_bias


class BatchedLinear(torch.autograd.Function):
    """Autograd of :func:`batched_forward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool) -> Tensor:
        """See batched_forward."""
        ctx.save_for_backward(x, weight, bias, expert)
        ctx.transposed = transposed
        return batched_forward(x, weight, bias, expert, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See batched_backward."""
        x, weight, bias, expert = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        return *batched_backward(grad, x, weight, bias, expert, ctx.transposed, needs), None, None
