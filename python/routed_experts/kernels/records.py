"""Rows as the products of E2M1 numbers read them: their memory and the launch that makes them, see packed.py."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from routed_experts.kernels.choice import Choice, Sizes
from routed_experts.kernels.constants import row_stride
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.memory import Piece
from routed_experts.kernels.packed import RECORD, STEP, record_rows

# A program holds a whole row, so many numbers a warp.
_WARP = 1024


def pieces_of(choice: Choice, sizes: Sizes) -> list[Piece]:
    """Scratch memory for the records of tokens and of gated units, if a call has any."""
    if not choice.has_records:
        return []
    tokens, units = (sizes.tokens, record_bytes(sizes.hidden)), (sizes.pairs, record_bytes(sizes.inner))
    return [Piece(shape, torch.float8_e4m3fn) for shape in (tokens, units)]


def record_bytes(width: int) -> int:
    """Bytes of the record of a row of so many numbers."""
    return width + int(RECORD.value)


def record(x: Tensor, out: Tensor) -> Launch:
    """Rows (T, N) to records (T, :func:`record_bytes`), in E4M3 memory."""
    rows, width = x.shape
    block = max(int(STEP.value), int(triton.next_power_of_2(width)))
    constants = {"WIDTH": width, "X_T": row_stride(x), "BLOCK_D": block}
    return Launch(record_rows, (rows, 1, 1), (x, out), constants, max(1, min(16, block // _WARP)))
