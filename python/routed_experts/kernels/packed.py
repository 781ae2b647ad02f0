"""Rows times columns of E2M1 numbers in groups of 32 with a power of two, on tensor cores for E4M3 (Hopper).

Rows are quantized before: a row is a record for each step of BLOCK_D, of that many E4M3 numbers, the even ones first
as they meet the low halves of the weights' bytes, and in RECORD more bytes their scale in float32. So they pass from
memory to the tensor cores untouched. E2M1 numbers become E4M3 ones in registers; how far the scale of a group is below
the largest becomes part of the numbers, whose exponents have room for eleven such powers: below the largest of all that
a program reads if that is room enough, which is cheaper, or else of each step and column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.decode import LEAST, power_of_two, scale_of_columns, to_e4m3, unfold_e2m1_scaled
from routed_experts.kernels.product import IS_INTERPRETED

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.

# Bytes of a record beside its numbers: what follows stays aligned to vectors.
RECORD = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows"])
def record_rows(
    x, out, num_rows, WIDTH: tl.constexpr, X_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Rows (T, WIDTH) to records of BLOCK_D numbers."""
    HALF: tl.constexpr = BLOCK_D // 2
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.program_id(1)
    mask_M = row_M < num_rows
    column_D = step * BLOCK_D + tl.arange(0, BLOCK_D)
    tile = tl.load(x + row_M[:, None].to(tl.int64) * X_T + column_D[None, :], mask=mask_M[:, None], other=0.0)
    values, scales = to_e4m3(tile.to(tl.float32), BLOCK_D)
    even, odd = tl.split(tl.reshape(values, (BLOCK_M, HALF, 2)))
    place_M = out + (row_M.to(tl.int64) * (WIDTH // BLOCK_D) + step) * (BLOCK_D + RECORD)
    place = place_M[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(place, even, mask=mask_M[:, None])
    tl.store(place + HALF, odd, mask=mask_M[:, None])
    tl.store((place_M + BLOCK_D).to(tl.pointer_type(tl.float32)), tl.reshape(scales, (BLOCK_M,)), mask=mask_M)


@triton.jit
def _dot(tile, row, acc):
    if IS_INTERPRETED:
        row, tile = row.to(tl.float32), tile.to(tl.float32)
    return tl.dot(tile, tl.trans(row), acc)


@triton.jit
def _range_of_scales(place_N, valid_N, begin, end):
    """The largest and the smallest scale of some columns, as stored: bytes along D, contiguous, four a word."""
    WORDS: tl.constexpr = 16
    word = tl.arange(0, WORDS)
    largest = tl.zeros((place_N.shape[0], WORDS), dtype=tl.int32)
    smallest = largest + 255
    for start in range(begin // 128, end // 128, WORDS):
        mask = valid_N[:, None] & (word < end // 128 - start)[None, :]
        four = tl.load(place_N.to(tl.pointer_type(tl.int32))[:, None] + (start + word)[None, :], mask=mask, other=0)
        for place in tl.static_range(4):
            one = (four >> (8 * place)) & 0xFF
            largest = tl.maximum(largest, one)
            smallest = tl.minimum(smallest, tl.where(mask, one, 255))
    return tl.max(tl.max(largest, axis=1), axis=0), tl.min(tl.min(smallest, axis=1), axis=0)


@triton.jit
def _sum_of_steps(
    rows_M, mask_M, weight, place_N, column_N, top, begin, end,
    N: tl.constexpr, W_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, ONE_TOP: tl.constexpr,
):
    """The product, (N, M); ``top`` is as large as any scale and none is far below it, or each step has one."""
    HALF: tl.constexpr = BLOCK_D // 2
    GROUPS: tl.constexpr = BLOCK_D // 32
    # All scales of a step and a column are one word.
    WORD: tl.constexpr = tl.uint64 if GROUPS == 8 else tl.uint32
    byte = tl.arange(0, HALF)
    rows_M += begin // BLOCK_D * (BLOCK_D + RECORD)
    row_ptr = rows_M[:, None] + byte[None, :]
    weight_ptr = weight + column_N[:, None].to(tl.int64) * W_N + (begin.to(tl.int64) // 2 + byte)[None, :]
    valid_N = column_N < N
    place_N += begin // 32
    shift = (8 * tl.arange(0, GROUPS)).to(WORD)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # Read a step ahead: nothing else would hide how far away they are.
    row_scale = tl.load((rows_M + BLOCK_D).to(tl.pointer_type(tl.float32)), mask=mask_M, other=0.0)
    for start in range(begin, end, BLOCK_D):
        even = tl.load(row_ptr, mask=mask_M[:, None], other=0.0)
        odd = tl.load(row_ptr + HALF, mask=mask_M[:, None], other=0.0)
        rows_M += BLOCK_D + RECORD
        following = mask_M & (start + BLOCK_D < end)
        next_scale = tl.load((rows_M + BLOCK_D).to(tl.pointer_type(tl.float32)), mask=following, other=0.0)
        word = tl.load(place_N.to(tl.pointer_type(WORD)), mask=valid_N, other=0)
        if EVEN:
            tile = tl.load(weight_ptr)
        else:
            tile = tl.load(weight_ptr, mask=valid_N[:, None] & (byte >= 0)[None, :], other=0)
        exponent = ((word[:, None] >> shift[None, :]) & 0xFF).to(tl.int32)
        if ONE_TOP:
            low, high = unfold_e2m1_scaled(tile, exponent, top - LEAST)
        else:
            top_N = (word & 0xFF).to(tl.int32)
            for group in tl.static_range(1, GROUPS):
                top_N = tl.maximum(top_N, ((word >> (8 * group)) & 0xFF).to(tl.int32))
            least = (top_N - LEAST)[:, None]
            low, high = unfold_e2m1_scaled(tile, tl.maximum(exponent, least), least)
        part = _dot(low, even, tl.zeros_like(acc))
        part = _dot(high, odd, part)
        if ONE_TOP:
            acc += part * row_scale[None, :]
        else:
            acc += part * (power_of_two(top_N)[:, None] * row_scale[None, :])
        row_scale = next_scale
        row_ptr += BLOCK_D + RECORD
        weight_ptr += HALF
        place_N += GROUPS
    return acc


@triton.jit
def recorded_product(
    rows_M, mask_M, weight, scale, column_N, begin, end,
    N: tl.constexpr, W_N: tl.constexpr, S_N: tl.constexpr, Q_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):
    """Recorded rows times columns (N, D): (M, N); D is whole steps, its codes and scales contiguous and aligned."""
    place_N = scale_of_columns(scale, column_N, N, S_N, Q_N)
    top, bottom = _range_of_scales(place_N, column_N < N, begin, end)
    if top - bottom < LEAST:
        acc = _sum_of_steps(rows_M, mask_M, weight, place_N, column_N, top, begin, end,
                            N, W_N, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, True) * power_of_two(top)
    else:
        acc = _sum_of_steps(rows_M, mask_M, weight, place_N, column_N, top, begin, end,
                            N, W_N, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, False)
    return tl.trans(acc * 2.0**-6)
