"""Rows times columns of E2M1 numbers in groups of 32 with a power of two, on tensor cores for E4M3 (Hopper).

Rows are quantized before: a row's record is its E4M3 numbers, in the order in which tensor cores meet them, and in
RECORD more bytes their scale in float32. So they pass from memory to the tensor cores untouched. E2M1 numbers become
E4M3 ones in registers; how far the scale of a group is below the largest becomes part of the numbers, whose exponents
have room for eleven such powers: below the largest of all that a program reads if that is room enough, which is
cheaper, or else of each step and column.
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
# Numbers of a column that are multiplied at a time: four groups, whose scales are a word.
STEP = tl.constexpr(128)


@triton.jit
def record_rows(x, out, WIDTH: tl.constexpr, X_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows (T, WIDTH) to their records, a row a program; BLOCK_D is at least WIDTH, and whole steps."""
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK_D)
    tile = tl.load(x + row * X_T + column_D, mask=column_D < WIDTH, other=0.0).to(tl.float32)
    values, scale = to_e4m3(tl.reshape(tile, (1, BLOCK_D)), BLOCK_D)
    # Bytes of a group of 16 are apart by as much as tensor cores take from a row at a time; see ``_operand``.
    values = tl.permute(tl.reshape(values, (BLOCK_D // STEP, 4, 4, 4, 2)), (0, 4, 2, 1, 3))
    place = out + row * (WIDTH + RECORD)
    tl.store(place + column_D, tl.reshape(values, (BLOCK_D,)), mask=column_D < WIDTH)
    tl.store((place + WIDTH).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1), tl.reshape(scale, (1,)))


@triton.jit
def _dot(tile, row, acc):
    if IS_INTERPRETED:
        row, tile = row.to(tl.float32), tile.to(tl.float32)
    return tl.dot(tile, tl.trans(row), acc)


@triton.jit
def _as_loaded(value_N, WARPS: tl.constexpr):
    """Values of the rows of an operand of tensor cores, (N,), in the order in which threads load the rows."""
    N: tl.constexpr = value_N.shape[0]
    if N % (16 * WARPS) == 0:
        split = tl.reshape(value_N, (N // (16 * WARPS), WARPS, 2, 8))
        value_N = tl.reshape(tl.permute(split, (0, 2, 1, 3)), (N,))
    return value_N


@triton.jit
def _as_multiplied(value_N, WARPS: tl.constexpr):
    """The inverse of ``_as_loaded``."""
    N: tl.constexpr = value_N.shape[0]
    if N % (16 * WARPS) == 0:
        split = tl.reshape(value_N, (N // (16 * WARPS), 2, WARPS, 8))
        value_N = tl.reshape(tl.permute(split, (0, 2, 1, 3)), (N,))
    return value_N


@triton.jit
def _operand(low, high, WARPS: tl.constexpr):
    """Numbers of the low and the high halves of bytes (N, 4, 16), as loaded, in the order of the records: (N, 128).

    A thread loads 16 bytes of a row, and its neighbours the rest of 64: that is how the tensor cores want a row's
    quarters, so that no number leaves its thread.
    """
    N: tl.constexpr = low.shape[0]
    both = tl.join(low, high)
    if N % (16 * WARPS) == 0:
        both = tl.reshape(both, (N // (16 * WARPS), 2, WARPS, 8, 4, 4, 4, 2))
        both = tl.permute(both, (0, 2, 1, 3, 7, 5, 4, 6))
    else:
        both = tl.permute(tl.reshape(both, (N, 4, 4, 4, 2)), (0, 4, 2, 1, 3))
    return tl.reshape(both, (N, 128))


@triton.jit
def _range_of_scales(place_N, begin, end, WORDS: tl.constexpr):
    """The largest and the smallest scale of some columns, as stored: bytes along D, contiguous, four a word."""
    word = tl.arange(0, WORDS)
    last = end // 128 - 1
    largest = tl.zeros((place_N.shape[0], WORDS), dtype=tl.int32)
    smallest = largest + 255
    for start in range(begin // 128, end // 128, WORDS):
        place = place_N.to(tl.pointer_type(tl.int32))[:, None] + tl.minimum(start + word, last)[None, :]
        four = tl.load(place)
        for byte in tl.static_range(4):
            one = (four >> (8 * byte)) & 0xFF
            largest = tl.maximum(largest, one)
            smallest = tl.minimum(smallest, one)
    return tl.max(tl.max(largest, axis=1), axis=0), tl.min(tl.min(smallest, axis=1), axis=0)


@triton.jit
def _sum_of_steps(
    rows_M, mask_M, weight, place_N, column_N, top, begin, end,
    N: tl.constexpr, W_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ONE_TOP: tl.constexpr, WARPS: tl.constexpr,
):
    """The product, (N, M); ``top`` is as large as any scale and none is far below it, or each step has one.

    ``column_N`` and ``place_N`` are in the order of loads.
    """
    byte = tl.arange(0, STEP // 2)
    row_ptr = rows_M[:, None] + (begin + tl.arange(0, STEP))[None, :]
    weight_ptr = weight + column_N[:, None].to(tl.int64) * W_N + (begin.to(tl.int64) // 2 + byte)[None, :]
    valid_N = column_N < N
    place_N += begin // 32
    shift = 8 * tl.arange(0, 4)[None, :, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _start in range(begin, end, STEP):
        row = tl.load(row_ptr, mask=mask_M[:, None], other=0.0)
        if EVEN:
            word = tl.load(place_N.to(tl.pointer_type(tl.int32)))
            tile = tl.load(weight_ptr)
        else:
            word = tl.load(place_N.to(tl.pointer_type(tl.int32)), mask=valid_N, other=0)
            tile = tl.load(weight_ptr, mask=valid_N[:, None] & (byte >= 0)[None, :], other=0)
        tile = tl.reshape(tile, (BLOCK_N, 4, 16))
        exponent = (word[:, None, None] >> shift) & 0xFF
        if ONE_TOP:
            low, high = unfold_e2m1_scaled(tile, exponent, top - LEAST)
            acc = _dot(_operand(low, high, WARPS), row, acc)
        else:
            top_N = word & 0xFF
            for group in tl.static_range(1, 4):
                top_N = tl.maximum(top_N, (word >> (8 * group)) & 0xFF)
            least = (top_N - LEAST)[:, None, None]
            low, high = unfold_e2m1_scaled(tile, tl.maximum(exponent, least), least)
            part = _dot(_operand(low, high, WARPS), row, tl.zeros_like(acc))
            acc += part * power_of_two(_as_multiplied(top_N, WARPS))[:, None]
        row_ptr += STEP
        weight_ptr += STEP // 2
        place_N += 4
    return acc


@triton.jit
def recorded_product(
    rows_M, mask_M, weight, scale, column_N, begin, end,
    D: tl.constexpr, N: tl.constexpr, W_N: tl.constexpr, S_N: tl.constexpr, Q_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):
    """Recorded rows times columns (N, D): (M, N); D is whole steps, its codes and scales contiguous and aligned."""
    WARPS: tl.constexpr = 8 if BLOCK_M >= 128 else 4
    WORDS: tl.constexpr = 64 if D > 4096 else 16 if D > 1024 else 8
    column_N = _as_loaded(column_N, WARPS)
    place_N = scale_of_columns(scale, column_N, N, S_N, Q_N)
    top, bottom = _range_of_scales(place_N, begin, end, WORDS)
    if top - bottom < LEAST:
        acc = _sum_of_steps(rows_M, mask_M, weight, place_N, column_N, top, begin, end,
                            N, W_N, BLOCK_M, BLOCK_N, EVEN, True, WARPS) * power_of_two(top)
    else:
        acc = _sum_of_steps(rows_M, mask_M, weight, place_N, column_N, top, begin, end,
                            N, W_N, BLOCK_M, BLOCK_N, EVEN, False, WARPS)
    row_scale = tl.load((rows_M + D).to(tl.pointer_type(tl.float32)), mask=mask_M, other=0.0)
    return tl.trans(acc) * (row_scale * 2.0**-6)[:, None]
