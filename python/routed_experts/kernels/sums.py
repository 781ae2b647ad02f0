"""Sums over the rows of an expert: the gradients of weights and biases; and over columns: that of routing weights.

Letters as in kernels/experts.py. One program adds up all rows of its expert, in sorted order, which is pair order: no
atomics, equal inputs give equal bits, and an expert without rows gets 0. ``ranges`` holds two numbers an expert, its
first sorted row and how many it has; ``tiles`` begins with ``order``, the pair of each sorted row.

Operands are rows in sorted order (PER of 0), or rows of a token, PER pairs each (1: rows in pair order).
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.product import IS_INTERPRETED
from routed_experts.kernels.rows import load_expert

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def expert_ranges(
    tiles, ranges, num_pairs, num_tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr,
):
    """First sorted row and number of rows of every expert, from the list of tiles."""
    own = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    fields = tiles + num_pairs
    first = tl.full((BLOCK_E,), 2**31 - 1, tl.int32)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_tiles, WIDTH):
        tile = start + tl.arange(0, WIDTH)
        exists = tile < num_tiles
        mine = tl.load(fields + tile, mask=exists, other=-1)[None, :] == own[:, None]
        begin = tl.load(fields + num_tiles + tile, mask=exists, other=0)[None, :]
        rows = tl.load(fields + 2 * num_tiles + tile, mask=exists, other=0)[None, :]
        first = tl.minimum(first, tl.min(tl.where(mine, begin, 2**31 - 1), axis=1))
        count += tl.sum(tl.where(mine, rows, 0), axis=1)
    tl.store(ranges + 2 * own, tl.where(count > 0, first, 0), mask=own < E)
    tl.store(ranges + 2 * own + 1, count, mask=own < E)


@triton.jit
def _load_rows(
    rows, pair_D, row_D, mask_D, column_N, N: tl.constexpr, PER: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, EVEN: tl.constexpr,
):
    """A tile (D, columns) of an operand; 0 where the mask is off."""
    place_D = row_D
    if PER > 0:
        place_D = pair_D // PER
    place = rows + place_D[:, None].to(tl.int64) * ROW + column_N[None, :] * COLUMN
    mask = mask_D[:, None]
    if not EVEN:
        mask = mask & (column_N < N)[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def expert_and_columns(
    program, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):
    """Expert of a program, and the first row and column of its block of the expert's matrix (M, N).

    Experts one after the other; inside one, GROUP blocks of M go through all blocks of N together, for L2.
    """
    BLOCKS_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    BLOCKS_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = program // (BLOCKS_M * BLOCKS_N)
    within = program % (BLOCKS_M * BLOCKS_N)
    group = within // (GROUP * BLOCKS_N)
    height = tl.minimum(BLOCKS_M - group * GROUP, GROUP)
    rest = within % (GROUP * BLOCKS_N)
    return expert, (group * GROUP + rest % height) * BLOCK_M, (rest // height) * BLOCK_N


@triton.jit
def weight_gradient(
    left, right, tiles, ranges, out,
    M: tl.constexpr, N: tl.constexpr, LEFT_PER: tl.constexpr, RIGHT_PER: tl.constexpr,
    LEFT_ROW: tl.constexpr, LEFT_COLUMN: tl.constexpr, RIGHT_ROW: tl.constexpr, RIGHT_COLUMN: tl.constexpr,
    OUT_E: tl.constexpr, OUT_M: tl.constexpr, OUT_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Sum over an expert's rows of left^T right: (E, M, N), written, or with ACCUMULATE added to what is there."""
    expert, from_M, from_N = expert_and_columns(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    column_M, column_N = from_M + tl.arange(0, BLOCK_M), from_N + tl.arange(0, BLOCK_N)
    begin, count = tl.load(ranges + 2 * expert), tl.load(ranges + 2 * expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    d = tl.arange(0, BLOCK_D)
    # A step ahead: rows whose place is loaded in the same step get half as many stages of the pipeline.
    next_D = tl.load(tiles + begin + d, mask=d < count, other=0)
    for start in range(0, count, BLOCK_D):
        mask_D = start + d < count
        row_D = begin + start + d
        pair_D = next_D
        if LEFT_PER + RIGHT_PER > 0:
            next_D = tl.load(tiles + row_D + BLOCK_D, mask=start + BLOCK_D + d < count, other=0)
        one = _load_rows(left, pair_D, row_D, mask_D, column_M, M, LEFT_PER, LEFT_ROW, LEFT_COLUMN, M % BLOCK_M == 0)
        two = _load_rows(right, pair_D, row_D, mask_D, column_N, N, RIGHT_PER, RIGHT_ROW, RIGHT_COLUMN,
                         N % BLOCK_N == 0)
        if IS_INTERPRETED:
            one, two = one.to(tl.float32), two.to(tl.float32)
        acc = tl.dot(tl.trans(one), two, acc, input_precision=PRECISION)
    place = out + expert.to(tl.int64) * OUT_E
    place += column_M[:, None].to(tl.int64) * OUT_M + column_N[None, :].to(tl.int64) * OUT_N
    mask = (column_M < M)[:, None] & (column_N < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(place, mask=mask, other=0.0)
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["weights"])
def bias_gradient(
    rows, tiles, ranges, weights, out,
    N: tl.constexpr, K: tl.constexpr, PER: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr, OUT_E: tl.constexpr, OUT_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Sum over an expert's rows, times their routing weights unless those are None: (E, N)."""
    expert = tl.program_id(0)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, count = tl.load(ranges + 2 * expert), tl.load(ranges + 2 * expert + 1)
    acc = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    for start in range(0, count, BLOCK_D):
        step_D = start + tl.arange(0, BLOCK_D)
        mask_D = step_D < count
        pair_D = begin + step_D
        if PER > 0:
            pair_D = tl.load(tiles + begin + step_D, mask=mask_D, other=0)
        row = _load_rows(rows, pair_D, begin + step_D, mask_D, column_N, N, PER, ROW, COLUMN, False).to(tl.float32)
        if weights is not None:
            place_D = weights + (pair_D // K).to(tl.int64) * WEIGHTS_T + (pair_D % K) * WEIGHTS_K
            row *= tl.load(place_D, mask=mask_D, other=0.0).to(tl.float32)[:, None]
        acc += row
    place = out + expert.to(tl.int64) * OUT_E + column_N * OUT_N
    tl.store(place, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=column_N < N)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def routing_gradient(
    partial, ids, grad, bias, out, num_pairs,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Gradient of every routing weight, (T, K): its partial sums (PARTS, S) and, with a bias, grad . bias; else 0."""
    pair_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    expert_S = load_expert(ids, pair_S, K, E, IDS_T, IDS_K, pair_S < num_pairs)
    real = expert_S >= 0
    total = tl.zeros((BLOCK_S,), dtype=tl.float32)
    place_S = partial + pair_S
    for _part in range(PARTS):
        total += tl.load(place_S, mask=real, other=0.0)
        place_S += num_pairs
    if bias is not None:
        row_S = grad + (pair_S // K).to(tl.int64) * HIDDEN
        bias_S = bias + expert_S.to(tl.int64) * BIAS_E
        for start in range(0, HIDDEN, BLOCK_N):
            column_N = start + tl.arange(0, BLOCK_N)
            mask = real[:, None] & (column_N < HIDDEN)[None, :]
            value = tl.load(row_S[:, None] + column_N[None, :], mask=mask, other=0.0).to(tl.float32)
            value *= tl.load(bias_S[:, None] + column_N[None, :] * BIAS_N, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(value, axis=1)
    tl.store(out + pair_S, total.to(out.dtype.element_ty), mask=pair_S < num_pairs)
