"""The products of large calls by tile, with operands fetched by Hopper's tensor memory accelerator (TMA).

Letters as in kernels/experts.py. Weights, and the rows of the second product, come through tensor descriptors: a
thread asks for a whole tile, and the others are free for the tensor cores. Gathered tokens cannot come that way and
are read through pointers.

A tile that is at most half full, as the last one of an expert often is, runs at half its height: at 4096 tokens those
rows would be a tenth to a sixth of the operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.gates import activate, gate_pair
from routed_experts.kernels.product import IS_INTERPRETED, load_bias
from routed_experts.kernels.rows import rows_in_tile, rows_of_tile, tile_and_block
from routed_experts.kernels.units import store_pair, store_rows

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def weight_tile(weight, expert, block, depth, GATE: tl.constexpr, TRANSPOSED: tl.constexpr, COLUMNS: tl.constexpr,
                BLOCK_D: tl.constexpr):
    """A tile (BLOCK_D, COLUMNS) of an expert's matrix; with halves, gate's columns and behind them those of up."""
    if TRANSPOSED:
        return tl.reshape(weight.load([expert, depth, block * COLUMNS]), (BLOCK_D, COLUMNS))
    if GATE == "halves":
        tile = weight.load([expert, 0, block * (COLUMNS // 2), depth])
    else:
        tile = weight.load([expert, block * COLUMNS, depth])
    return tl.trans(tl.reshape(tile, (COLUMNS, BLOCK_D)))


@triton.jit
def _up_tile(
    x, tiles, weight, bias, out, raw, num_pairs, num_tiles, tile, block,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, X_T: tl.constexpr, X_H: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The first BLOCK_M rows of a tile, see ``up_large``."""
    GATED: tl.constexpr = GATE == "halves" or GATE == "pairs"
    COLUMNS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row_ptr = x + (pair_M // K).to(tl.int64)[:, None] * X_T + d[None, :] * X_H
    acc = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_D):
        mask = mask_M[:, None]
        if HIDDEN % BLOCK_D != 0:
            mask = mask & (d < HIDDEN - start)[None, :]
        row = tl.load(row_ptr + start * X_H, mask=mask, other=0.0)
        column = weight_tile(weight, expert, block, start, GATE, TRANSPOSED, COLUMNS, BLOCK_D)
        if IS_INTERPRETED:
            row, column = row.to(tl.float32), column.to(tl.float32)
        acc = tl.dot(row, column, acc)
    column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        # Both ways of standing side by side end with a thread holding gate and up of the same unit.
        if GATE == "halves":
            both = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
        else:
            both = tl.reshape(acc, (BLOCK_M, BLOCK_N, 2))
        gate, linear = tl.split(both)
        if bias is not None:
            step: tl.constexpr = 1 if GATE == "halves" else 2
            other: tl.constexpr = INNER if GATE == "halves" else 1
            gate += load_bias(bias, expert, step * column_N, 2 * INNER, BIAS_E, BIAS_N)[None, :]
            linear += load_bias(bias, expert, step * column_N + other, 2 * INNER, BIAS_E, BIAS_N)[None, :]
        if raw is not None:
            store_pair(raw, gate, linear, row_M, mask_M, block, GATE, INNER, BLOCK_M, BLOCK_N)
        acc = gate_pair(gate, linear, ACTIVATION, LIMIT, ALPHA)
    else:
        if bias is not None:
            acc += load_bias(bias, expert, column_N, INNER, BIAS_E, BIAS_N)[None, :]
        if raw is not None:
            store_rows(raw, acc, row_M, mask_M, column_N, INNER)
        if GATE == "none":
            acc = activate(acc, ACTIVATION)
    store_rows(out, acc, row_M, mask_M, column_N, INNER)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def up_large(
    x, tiles, weight, bias, out, raw, num_pairs, num_tiles,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, X_T: tl.constexpr, X_H: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):
    """First product and gate: tokens (T, H) to sorted rows (S, I); the product itself to ``raw`` unless it is None."""
    tile, block = tile_and_block(tl.program_id(0), (INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    count = rows_in_tile(tiles, tile, num_pairs, num_tiles)
    if count > BLOCK_M // 2:
        _up_tile(x, tiles, weight, bias, out, raw, num_pairs, num_tiles, tile, block, K, HIDDEN, INNER, X_T, X_H,
                 BIAS_E, BIAS_N, GATE, ACTIVATION, LIMIT, ALPHA, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_D)
    elif count > 0:
        _up_tile(x, tiles, weight, bias, out, raw, num_pairs, num_tiles, tile, block, K, HIDDEN, INNER, X_T, X_H,
                 BIAS_E, BIAS_N, GATE, ACTIVATION, LIMIT, ALPHA, TRANSPOSED, BLOCK_M // 2, BLOCK_N, BLOCK_D)


@triton.jit
def _down_tile(
    a, tiles, weight, bias, slots, num_pairs, num_tiles, tile, block,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIAS_E: tl.constexpr, BIAS_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SORTED: tl.constexpr,
):
    """The first BLOCK_M rows of a tile, see ``down_large``."""
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    first = tl.load(tiles + num_pairs + num_tiles + tile)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, INNER, BLOCK_D):
        # A tile may reach into the next expert's rows; what comes of them is not stored.
        row = a.load([first, start])
        column = weight_tile(weight, expert, block, start, "none", TRANSPOSED, BLOCK_N, BLOCK_D)
        if IS_INTERPRETED:
            row, column = row.to(tl.float32), column.to(tl.float32)
        acc = tl.dot(row, column, acc)
    column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias is not None:
        acc += load_bias(bias, expert, column_N, HIDDEN, BIAS_E, BIAS_N)[None, :]
    store_rows(slots, acc, row_M if SORTED else pair_M, mask_M, column_N, HIDDEN)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def down_large(
    a, a_half, tiles, weight, bias, slots, num_pairs, num_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIAS_E: tl.constexpr, BIAS_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Second product, not yet weighted: sorted rows (S, I) to a row of every pair (S, H).

    ``a`` and ``a_half`` are descriptors of the rows, the second for tiles of half the height. SORTED leaves the rows
    of the result sorted too.
    """
    tile, block = tile_and_block(tl.program_id(0), (HIDDEN + BLOCK_N - 1) // BLOCK_N, GROUP)
    count = rows_in_tile(tiles, tile, num_pairs, num_tiles)
    if count > BLOCK_M // 2:
        _down_tile(a, tiles, weight, bias, slots, num_pairs, num_tiles, tile, block, HIDDEN, INNER, BIAS_E, BIAS_N,
                   TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_D, SORTED)
    elif count > 0:
        _down_tile(a_half, tiles, weight, bias, slots, num_pairs, num_tiles, tile, block, HIDDEN, INNER, BIAS_E, BIAS_N,
                   TRANSPOSED, BLOCK_M // 2, BLOCK_N, BLOCK_D, SORTED)
