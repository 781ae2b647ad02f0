"""Rows as the products of E2M1 numbers read them: their memory and the launch that makes them, see packed.py."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from routed_experts.kernels.choice import Choice, Sizes
from routed_experts.kernels.constants import row_stride
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.memory import Piece
from routed_experts.kernels.packed import RECORD, record_rows

_ROWS = 4


def pieces_of(choice: Choice, sizes: Sizes) -> list[Piece]:
    """Scratch memory for the records of tokens and of gated units, if a call has any."""
    if not choice.has_records:
        return []
    tokens = (sizes.tokens, record_bytes(sizes.hidden, choice.up.depth))
    units = (sizes.pairs, record_bytes(sizes.inner, choice.down.depth))
    return [Piece(shape, torch.float8_e4m3fn) for shape in (tokens, units)]


def record_bytes(width: int, depth: int) -> int:
    """Bytes of a row of so many numbers, in records of ``depth``."""
    return width // depth * (depth + int(RECORD.value))


def record(x: Tensor, out: Tensor, depth: int) -> Launch:
    """Rows (T, N) to records (T, :func:`record_bytes`) of so many numbers, in E4M3 memory."""
    rows, width = x.shape
    constants = {"WIDTH": width, "X_T": row_stride(x), "BLOCK_M": _ROWS, "BLOCK_D": depth}
    return Launch(record_rows, (triton.cdiv(rows, _ROWS), width // depth, 1), (x, out, rows), constants)
