"""A product for each row with a copy of its expert's matrix, in chunks under ROUTED_EXPERTS_BATCHED_BYTES."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from routed_experts.combine import take_rows
from routed_experts.facts import BATCHED_BYTES, batched_budget
from routed_experts.layout import build_layout
from routed_experts.products import loop


class Matrices(Protocol):
    """What stands for a tensor of matrices (E, A, B) that are made when they are copied."""

    shape: tuple[int, int, int]
    matrix_bytes: int  # held at once for one copy

    def take(self, expert: Tensor) -> Tensor:
        """Return a copy of its matrix for every row of ``expert``."""


logger = logging.getLogger("routed_experts")


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


def _chunks(expert: Tensor, weight: Tensor | Matrices, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of pairs whose copied matrices stay inside the budget, announced before anything is allocated."""
    matrix_bytes = weight.shape[1] * weight.shape[2] * torch.empty((), dtype=dtype).element_size()
    if not isinstance(weight, Tensor):
        matrix_bytes = weight.matrix_bytes
    chunk, pairs = max(1, batched_budget() // matrix_bytes), expert.shape[0]
    _announce(pairs, matrix_bytes, chunk)
    return [(start, min(start + chunk, pairs)) for start in range(0, pairs, chunk)]


def _copies(weight: Tensor | Matrices, expert: Tensor) -> Tensor:
    """One copy of its matrix for every pair."""
    return take_rows(weight, expert) if isinstance(weight, Tensor) else weight.take(expert)


def linear(
    x: Tensor, weight: Tensor | Matrices, bias: Tensor | None, expert: Tensor, transposed: bool, clean: bool
) -> Tensor:
    """Rows in any order times copies of their experts' matrices: (S, D) -> (S, N)."""
    out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    safe = expert.clamp(min=0)
    for start, end in _chunks(expert, weight, x.dtype):
        copies = _copies(weight, safe[start:end]).to(x.dtype)
        matrices = copies.mT if transposed else copies
        torch.bmm(matrices, x[start:end, :, None], out=out[start:end, :, None])
    if bias is not None:
        out += take_rows(bias.to(x.dtype), safe)
    return out.masked_fill_((expert < 0)[:, None], 0) if clean else out


def weight_grad(x: Tensor, grad: Tensor, expert: Tensor, transposed: bool, weight: Tensor) -> Tensor:
    """Sum over each expert's rows, sorted first: a sum over copies would need atomics."""
    layout = build_layout(expert[:, None], weight.shape[0])
    rows, grads = take_rows(x, layout.order), take_rows(grad, layout.order)
    return loop.weight_grad(rows, grads, layout.offsets, transposed, weight)


def bias_grad(grad: Tensor, expert: Tensor, bias: Tensor) -> Tensor:
    """Sum over each expert's rows, sorted first."""
    layout = build_layout(expert[:, None], bias.shape[0])
    return loop.bias_grad(take_rows(grad, layout.order), layout.offsets, bias)
