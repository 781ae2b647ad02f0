"""Gated units as they stand in memory: both parts of a unit in one thread, halves or pairs of columns outside."""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def store_rows(out, tile, row_M, mask_M, column_N, N: tl.constexpr):
    """Store a tile (M, columns) to rows (S, N)."""
    place = out + row_M[:, None].to(tl.int64) * N + column_N[None, :]
    tl.store(place, tile.to(out.dtype.element_ty), mask=mask_M[:, None] & (column_N < N)[None, :])


@triton.jit
def store_pair(
    out, gate, linear, row_M, mask_M, block,
    GATE: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Store both parts of a block of units, (M, N) each, to rows (S, 2I)."""
    if GATE == "halves":
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        place = out + row_M[:, None].to(tl.int64) * (2 * INNER) + column_N[None, :]
        mask = mask_M[:, None] & (column_N < INNER)[None, :]
        tl.store(place, gate.to(out.dtype.element_ty), mask=mask)
        tl.store(place + INNER, linear.to(out.dtype.element_ty), mask=mask)
    else:
        both = tl.reshape(tl.join(gate, linear), (BLOCK_M, 2 * BLOCK_N))
        store_rows(out, both, row_M, mask_M, block * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N), 2 * INNER)


@triton.jit
def load_pair(
    rows, row_M, mask_M, block,
    GATE: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Both parts of a block of units, (M, N) each in float32, from rows (S, 2I)."""
    start = rows + row_M[:, None].to(tl.int64) * (2 * INNER)
    if GATE == "halves":
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = mask_M[:, None] & (column_N < INNER)[None, :]
        gate = tl.load(start + column_N[None, :], mask=mask, other=0.0)
        linear = tl.load(start + INNER + column_N[None, :], mask=mask, other=0.0)
    else:
        both_N = block * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        mask = mask_M[:, None] & (both_N < 2 * INNER)[None, :]
        both = tl.load(start + both_N[None, :], mask=mask, other=0.0)
        gate, linear = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    return gate.to(tl.float32), linear.to(tl.float32)
