"""torch's grouped GEMM, which neither waits for the offsets nor takes every dtype, stride and device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from routed_experts.combine import take_rows


def _owned(offsets: Tensor, rows: int) -> Tensor:
    return (torch.arange(rows, device=offsets.device, dtype=torch.int32) < offsets[-1])[:, None]


def _row_expert(offsets: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets, row, right=True).clamp_(max=offsets.shape[0] - 1)


def _grouped_mm(x: Tensor, matrix: Tensor, offsets: Tensor) -> Tensor:
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10 on
    return grouped_mm(x, matrix, offs=offsets)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, clean: bool) -> Tensor:
    """Sorted rows times their experts' matrices: (S, D) -> (S, N)."""
    # A cast under autocast copies the stack, as autocast does for every linear layer.
    out = _grouped_mm(x, (weight if transposed else weight.mT).to(x.dtype), offsets)
    if bias is not None:
        out = out + take_rows(bias.to(x.dtype), _row_expert(offsets, x.shape[0]))
    # The kernel leaves rows past the last offset as they were in memory, NaN included.
    return out.masked_fill(~_owned(offsets, x.shape[0]), 0) if clean else out


def weight_grad(x: Tensor, grad: Tensor, offsets: Tensor, transposed: bool, weight: Tensor) -> Tensor:
    """Sum of each expert's outer products, in the weight's strides and dtype; exactly 0 for idle experts."""
    left, right = (x, grad) if transposed else (grad, x)
    grad_weight = _grouped_mm(left.mT, right, offsets)
    return torch.empty_like(weight).copy_(grad_weight)


def bias_grad(grad: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
    """Sum of each expert's rows, (E, N)."""
    # A one-hot product sums in a fixed order and needs neither atomics nor the counts on the host.
    rows = grad.shape[0]
    expert = torch.arange(offsets.shape[0], device=offsets.device)[:, None]
    one_hot = (_row_expert(offsets, rows)[None, :] == expert) & _owned(offsets, rows)[None, :, 0]
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (one_hot.to(wide) @ grad.to(wide)).to(bias.dtype)
