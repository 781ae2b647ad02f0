"""Gradients of the weights of large calls: both operands sorted, and fetched by tensor descriptors.

Letters as in kernels/sums.py. What is read by token is gathered first, for a descriptor cannot: the copy costs less
than what reading through pointers takes from the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.product import IS_INTERPRETED
from routed_experts.kernels.rows import load_expert
from routed_experts.kernels.sums import expert_and_columns

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def gather_rows(
    rows, tiles, ids, out, num_pairs,
    PER: tl.constexpr, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    IDS_T: tl.constexpr, IDS_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Rows that PER pairs share to sorted rows (S, WIDTH); those of sentinels are left as they are."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row_M < num_pairs
    pair_M = tl.load(tiles + row_M, mask=exists, other=0)
    real = load_expert(ids, pair_M, K, E, IDS_T, IDS_K, exists) >= 0
    for start in range(0, WIDTH, BLOCK_N):
        column_N = start + tl.arange(0, BLOCK_N)
        mask = real[:, None] & (column_N < WIDTH)[None, :]
        row = tl.load(rows + (pair_M // PER).to(tl.int64)[:, None] * ROW + column_N[None, :], mask=mask)
        tl.store(out + row_M.to(tl.int64)[:, None] * WIDTH + column_N[None, :], row, mask=mask)


@triton.jit
def _last_rows(rows, row_D, mask_D, column_N, N: tl.constexpr):
    """A tile (D, columns) of rows (S, N); 0 where the mask is off."""
    place = rows + row_D[:, None].to(tl.int64) * N + column_N[None, :]
    return tl.load(place, mask=mask_D[:, None] & (column_N < N)[None, :], other=0.0)


@triton.jit
def weight_gradient_large(
    left, right, left_rows, right_rows, ranges, out,
    M: tl.constexpr, N: tl.constexpr, OUT_E: tl.constexpr, OUT_M: tl.constexpr, OUT_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Sum over an expert's rows of left^T right: (E, M, N), written, or with ACCUMULATE added to what is there.

    ``left`` (S, M) and ``right`` (S, N) are descriptors of ``left_rows`` and ``right_rows``.
    """
    expert, from_M, from_N = expert_and_columns(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    begin, count = tl.load(ranges + 2 * expert), tl.load(ranges + 2 * expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    whole = count // BLOCK_D * BLOCK_D
    for start in range(0, whole, BLOCK_D):
        one = left.load([begin + start, from_M])
        two = right.load([begin + start, from_N])
        if IS_INTERPRETED:
            one, two = one.to(tl.float32), two.to(tl.float32)
        acc = tl.dot(tl.trans(one), two, acc)
    column_M, column_N = from_M + tl.arange(0, BLOCK_M), from_N + tl.arange(0, BLOCK_N)
    if whole < count:
        # A whole tile would reach into rows of the next expert, or into those that nobody wrote.
        step_D = whole + tl.arange(0, BLOCK_D)
        one = _last_rows(left_rows, begin + step_D, step_D < count, column_M, M)
        two = _last_rows(right_rows, begin + step_D, step_D < count, column_N, N)
        if IS_INTERPRETED:
            one, two = one.to(tl.float32), two.to(tl.float32)
        acc = tl.dot(tl.trans(one), two, acc)
    place = out + expert.to(tl.int64) * OUT_E
    place += column_M[:, None].to(tl.int64) * OUT_M + column_N[None, :].to(tl.int64) * OUT_N
    mask = (column_M < M)[:, None] & (column_N < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(place, mask=mask, other=0.0)
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
