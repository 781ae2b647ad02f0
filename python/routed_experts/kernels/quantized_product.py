"""Rows times columns of one expert's matrix that is stored in 8 or 4 bits, in float32.

Weights travel as they are stored and are unfolded in registers. Where their scales are applied depends on how many of
the summed dimension D one scale covers (Q_D):

* all of it, or whole steps of BLOCK_D: to the float32 partial sums, which is as exact as they are;
* less than a step: to the numbers themselves, in the rows' dtype. Powers of two are exact there.

Where NARROW, E4M3 weights stay what they are and every step of the rows is quantized instead: so few rows are less work
than so many weights, which then pass from memory to the tensor cores untouched. For E2M1 weights see kernels/packed.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.decode import (
    block_of,
    load_scale,
    scale_of_columns,
    to_e4m3,
    unfold_e2m1,
    widen_e2m1,
    widen_e4m3,
)
from routed_experts.kernels.packed import RECORD, recorded_product
from routed_experts.kernels.product import IS_INTERPRETED, product

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def _dot(row, tile, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """Rows (M, D) times columns (N, D), added to (M, N), or to (N, M) swapped."""
    if IS_INTERPRETED:
        row, tile = row.to(tl.float32), tile.to(tl.float32)
    if SWAP:
        acc = tl.dot(tile, tl.trans(row), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(row, tl.trans(tile), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scaled(tile, place_N, first, D: tl.constexpr, S_D: tl.constexpr, Q_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile (N, BLOCK_D) times its scales, several along D; ``place_N`` is where those of its columns begin."""
    BLOCK_N: tl.constexpr = tile.shape[0]
    # Powers of two have the range and all the digits of bfloat16.
    EXACT: tl.constexpr = tile.dtype == tl.bfloat16 if place_N.dtype.element_ty == tl.uint8 else False
    if Q_D > 0 and BLOCK_D % Q_D == 0:
        GROUPS: tl.constexpr = BLOCK_D // Q_D
        group = first // Q_D + tl.arange(0, GROUPS)
        mask = (group < (D + Q_D - 1) // Q_D)[None, :] & (tl.arange(0, BLOCK_N) >= 0)[:, None]
        scale = load_scale(place_N[:, None] + group[None, :] * S_D, mask)
        groups = tl.reshape(tile, (BLOCK_N, GROUPS, Q_D))
        if IS_INTERPRETED:
            groups = (groups.to(tl.float32) * scale[:, :, None]).to(tile.dtype)
        elif EXACT:
            groups *= scale.to(tile.dtype)[:, :, None]
        else:
            groups = (groups.to(tl.float32) * scale[:, :, None]).to(tile.dtype)
        tile = tl.reshape(groups, (BLOCK_N, BLOCK_D))
    else:
        d = first + tl.arange(0, BLOCK_D)
        mask = (d < D)[None, :] & (tl.arange(0, BLOCK_N) >= 0)[:, None]
        scale = load_scale(place_N[:, None] + block_of(d, Q_D)[None, :] * S_D, mask)
        tile = (tile.to(tl.float32) * scale).to(tile.dtype)
    return tile


@triton.jit
def _stored_tile(weight_ptr, column_N, rest, DTYPE: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr,
                 EVEN: tl.constexpr):
    """A tile of weights (N, D), in a wider type."""
    if EVEN:
        tile = tl.load(weight_ptr)
    else:
        tile = tl.load(weight_ptr, mask=(column_N < N)[:, None] & rest[None, :], other=0.0)
    if FORMAT == "e2m1_columns":
        # Two columns a byte: each takes its half.
        tile = widen_e2m1((tile >> ((column_N % 2) * 4)[:, None].to(tl.uint8)) & 0xF, DTYPE)
    else:
        tile = widen_e4m3(tile, DTYPE)
    return tile


@triton.jit
def stored_product(
    rows_M, mask_M, weight, scale, column_N, begin, end,
    D: tl.constexpr, N: tl.constexpr, ROW_D: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    FORMAT: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Rows times columns stored as a number a byte, or with FORMAT e2m1_columns as two columns a byte: (M, N)."""
    DTYPE: tl.constexpr = rows_M.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    row_ptr = rows_M[:, None] + (begin.to(tl.int64) + d)[None, :] * ROW_D
    byte_N = column_N // 2 if FORMAT == "e2m1_columns" else column_N
    weight_ptr = weight + byte_N[:, None].to(tl.int64) * W_N + (begin.to(tl.int64) + d)[None, :] * W_D
    place_N = scale_of_columns(scale, column_N, N, S_N, Q_N)
    valid_N = column_N < N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_D):
        rest = d < D - start
        if EVEN:
            row = tl.load(row_ptr, mask=mask_M[:, None], other=0.0)
        else:
            row = tl.load(row_ptr, mask=mask_M[:, None] & rest[None, :], other=0.0)
        tile = _stored_tile(weight_ptr, column_N, rest, tl.float8e4nv if NARROW else DTYPE, N, FORMAT, EVEN)
        if NARROW:
            row, row_scale = to_e4m3(row.to(tl.float32), BLOCK_D)
            row_scale = tl.reshape(row_scale, (BLOCK_M,))
            value_N = load_scale(place_N + (start // Q_D) * S_D, valid_N)
            part = _dot(row, tile, tl.zeros_like(acc), SWAP, "ieee")
            if SWAP:
                acc += part * (value_N[:, None] * row_scale[None, :])
            else:
                acc += part * (row_scale[:, None] * value_N[None, :])
        elif Q_D >= D:
            acc = _dot(row, tile, acc, SWAP, PRECISION)
        elif Q_D > 0 and Q_D % BLOCK_D == 0:
            value_N = load_scale(place_N + (start // Q_D) * S_D, valid_N)
            part = _dot(row, tile, tl.zeros_like(acc), SWAP, PRECISION)
            acc += part * (value_N[:, None] if SWAP else value_N[None, :])
        else:
            acc = _dot(row, _scaled(tile, place_N, start, D, S_D, Q_D, BLOCK_D), acc, SWAP, PRECISION)
        row_ptr += BLOCK_D * ROW_D
        weight_ptr += BLOCK_D * W_D
    if SWAP:
        acc = tl.trans(acc)
    if Q_D >= D and not NARROW:
        acc *= load_scale(place_N, valid_N)[None, :]
    return acc


@triton.jit
def packed_product(
    rows_M, mask_M, weight, scale, column_N, begin, end,
    D: tl.constexpr, N: tl.constexpr, ROW_D: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Rows times columns of which a byte has two numbers along D: (M, N).

    The even numbers are in the low halves, the odd ones in the high halves, and each have a product of their own:
    nothing changes its place that way but the rows, which are few.
    """
    DTYPE: tl.constexpr = rows_M.dtype.element_ty
    HALF: tl.constexpr = BLOCK_D // 2
    d, byte = tl.arange(0, BLOCK_D), tl.arange(0, HALF)
    row_ptr = rows_M[:, None] + (begin.to(tl.int64) + d)[None, :] * ROW_D
    weight_ptr = weight + column_N[:, None].to(tl.int64) * W_N + (begin.to(tl.int64) // 2 + byte)[None, :] * W_D
    place_N = scale_of_columns(scale, column_N, N, S_N, Q_N)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_D):
        if EVEN:
            row = tl.load(row_ptr, mask=mask_M[:, None], other=0.0)
            tile = tl.load(weight_ptr)
        else:
            row = tl.load(row_ptr, mask=mask_M[:, None] & (d < D - start)[None, :], other=0.0)
            tile = tl.load(weight_ptr, mask=(column_N < N)[:, None] & (byte < (D - start) // 2)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(row, (BLOCK_M, HALF, 2)))
        low, high = unfold_e2m1(tile, DTYPE)
        low = _scaled(low, place_N, start // 2, D // 2, S_D, Q_D // 2, HALF)
        high = _scaled(high, place_N, start // 2, D // 2, S_D, Q_D // 2, HALF)
        acc = _dot(even, low, acc, SWAP, PRECISION)
        acc = _dot(odd, high, acc, SWAP, PRECISION)
        row_ptr += BLOCK_D * ROW_D
        weight_ptr += HALF * W_D
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def any_product(
    rows_M, mask_M, weight, scale, column_N, begin, end,
    D: tl.constexpr, N: tl.constexpr, ROW_D: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    FORMAT: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Rows times columns of one expert's matrix over begin..end: (M, N), float32; FORMAT None is not quantized."""
    if FORMAT is None:
        acc = product(rows_M, mask_M, weight, column_N, begin, end, D, N, ROW_D, W_N, W_D,
                      BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, PRECISION)
    elif FORMAT == "e2m1" and NARROW:
        acc = recorded_product(rows_M, mask_M, weight, scale, column_N, begin, end,
                               D, N, W_N, S_N, Q_N, BLOCK_M, BLOCK_N, EVEN)
    elif FORMAT == "e2m1":
        acc = packed_product(rows_M, mask_M, weight, scale, column_N, begin, end, D, N, ROW_D, W_N, W_D,
                             S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, PRECISION)
    else:
        acc = stored_product(rows_M, mask_M, weight, scale, column_N, begin, end, D, N, ROW_D, W_N, W_D,
                             FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
    return acc


@triton.jit
def length_of_rows(D: tl.constexpr, FORMAT: tl.constexpr, NARROW: tl.constexpr):
    """Elements of a row of D numbers in memory."""
    RECORDED: tl.constexpr = FORMAT == "e2m1" and NARROW
    LENGTH: tl.constexpr = D + RECORD if RECORDED else D
    return LENGTH
