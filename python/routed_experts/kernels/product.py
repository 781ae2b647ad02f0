"""Rows times columns of one expert's matrix, in float32."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 for integers: there, numbers are widened first.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def product(
    rows_M, mask_M, weight, column_N, begin, end,
    D: tl.constexpr, N: tl.constexpr, ROW_D: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Rows (M pointers to their first element) times columns of one expert's matrix over begin..end: (M, N), float32.

    SWAP computes the transpose: weights stand where the tensor cores want at least 64 rows.
    """
    d = tl.arange(0, BLOCK_D)
    row_ptr = rows_M[:, None] + d[None, :] * ROW_D
    weight_ptr = weight + column_N[:, None].to(tl.int64) * W_N + d[None, :] * W_D
    column_mask = column_N < N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_ptr += begin.to(tl.int64) * ROW_D
    weight_ptr += begin.to(tl.int64) * W_D
    for start in range(begin, end, BLOCK_D):
        if EVEN:
            row = tl.load(row_ptr, mask=mask_M[:, None], other=0.0)
            tile = tl.load(weight_ptr)
        else:
            rest = d < D - start
            row = tl.load(row_ptr, mask=mask_M[:, None] & rest[None, :], other=0.0)
            tile = tl.load(weight_ptr, mask=column_mask[:, None] & rest[None, :], other=0.0)
        tile = tile.to(row.dtype)  # autocast: weights of another dtype are converted here and never copied
        if IS_INTERPRETED:
            row, tile = row.to(tl.float32), tile.to(tl.float32)
        if SWAP:
            acc = tl.dot(tile, tl.trans(row), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(row, tl.trans(tile), acc, input_precision=PRECISION)
        row_ptr += BLOCK_D * ROW_D
        weight_ptr += BLOCK_D * W_D
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def load_bias(bias, expert, column_N, N: tl.constexpr, BIAS_E: tl.constexpr, BIAS_N: tl.constexpr):
    """An expert's bias of some columns, in float32; 0 behind the last."""
    return tl.load(bias + expert.to(tl.int64) * BIAS_E + column_N * BIAS_N, mask=column_N < N, other=0.0).to(tl.float32)
