"""The products of many rows in E4M3 on both sides, for the tensor cores that multiply such numbers (SM89 and newer).

Letters as in kernels/experts.py. Tokens are quantized once (``quantize_rows``), gated units where they are made: each
row has a scale for every group of columns, and so many columns are one tile of the first product. The tensor cores sum
over a step, which no scale ends within; what they sum is scaled and added in float32.

Weights, and the rows of the second product, come through tensor descriptors where DESCRIBED, else through pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.decode import load_scale, scale_of_columns, to_e4m3
from routed_experts.kernels.gates import activate, gate_pair
from routed_experts.kernels.product import IS_INTERPRETED, load_bias
from routed_experts.kernels.rows import rows_of_tile, tile_and_block
from routed_experts.kernels.units import store_rows

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows(
    x, out, scale, num_rows,
    WIDTH: tl.constexpr, X_T: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Rows (T, H) to E4M3, contiguous, and a scale for each GROUP of a row's columns."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row_M < num_rows)[:, None] & (column_N < WIDTH)[None, :]
    tile = tl.load(x + row_M[:, None].to(tl.int64) * X_T + column_N[None, :], mask=mask, other=0.0).to(tl.float32)
    values, scales = to_e4m3(tile, GROUP)
    tl.store(out + row_M[:, None].to(tl.int64) * WIDTH + column_N[None, :], values, mask=mask)
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.program_id(1) * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
    place = scale + row_M[:, None].to(tl.int64) * GROUPS + group[None, :]
    tl.store(place, scales, mask=(row_M < num_rows)[:, None] & (group < GROUPS)[None, :])


@triton.jit
def _weight_tile(
    weight, expert, column, start,
    D: tl.constexpr, N: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr, DESCRIBED: tl.constexpr,
):
    """Weights (D, columns) from ``column`` on; TWO puts as many behind them that stand HALF further."""
    COLUMNS: tl.constexpr = 2 * BLOCK_N if TWO else BLOCK_N
    if DESCRIBED:
        if TWO:
            tile = tl.reshape(weight.load([expert, 0, column, start]), (COLUMNS, BLOCK_D))
        else:
            tile = tl.reshape(weight.load([expert, column, start]), (COLUMNS, BLOCK_D))
    else:
        within_N, d = tl.arange(0, COLUMNS), start + tl.arange(0, BLOCK_D)
        column_N = column + within_N % BLOCK_N + within_N // BLOCK_N * HALF
        place = weight + expert.to(tl.int64) * W_E + column_N[:, None].to(tl.int64) * W_N + d[None, :] * W_D
        if EVEN:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(column_N < N)[:, None] & (d < D)[None, :], other=0.0)
    return tl.trans(tile)


@triton.jit
def _add(acc, part, row_scale, value, ONE_SCALE: tl.constexpr):
    """What one step has summed, scaled, added; ``value`` is the scale of all columns, or of each."""
    if ONE_SCALE:
        acc += part * (row_scale * value)[:, None]
    else:
        acc += part * (row_scale[:, None] * value[None, :])
    return acc


@triton.jit
def _product(
    rows, first, row_scale_M, mask_M, weight, scale, expert, column,
    D: tl.constexpr, N: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr, HALF: tl.constexpr,
    S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    ROW_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, TWO: tl.constexpr, ONE_SCALE: tl.constexpr, DESCRIBED: tl.constexpr, BY_POINTER: tl.constexpr,
):
    """Rows times BLOCK_N columns from ``column`` on and, if TWO, times as many HALF further: both (M, N).

    ``rows`` are pointers to their first elements (BY_POINTER), or a descriptor of rows from ``first`` on. Scales are
    read a step ahead: nothing else would hide how far away they are.
    """
    d = tl.arange(0, BLOCK_D)
    scale += expert.to(tl.int64) * S_E
    columns = column
    if not ONE_SCALE:
        columns = column + tl.arange(0, BLOCK_N)
    place = scale_of_columns(scale, columns, N, S_N, Q_N)
    other_place = scale_of_columns(scale, columns + HALF, N, S_N, Q_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_scale = tl.load(row_scale_M, mask=mask_M, other=0.0)
    value, other = load_scale(place, columns < N), load_scale(other_place, columns < N)
    for start in range(0, D, BLOCK_D):
        if BY_POINTER:
            mask = mask_M[:, None]
            if D % BLOCK_D != 0:
                mask = mask & (d < D - start)[None, :]
            row = tl.load(rows[:, None] + (start + d)[None, :], mask=mask, other=0.0)
        else:
            # A tile may reach into the next expert's rows; what comes of them is not stored.
            row = rows.load([first, start])
        tile = _weight_tile(
            weight, expert, column, start, D, N, W_E, W_N, W_D, HALF, BLOCK_N, BLOCK_D, EVEN, TWO, DESCRIBED)
        following = tl.minimum(start + BLOCK_D, D - 1)
        next_row_scale = tl.load(row_scale_M + following // ROW_GROUP, mask=mask_M, other=0.0)
        next_value = load_scale(place + (following // Q_D) * S_D, columns < N)
        next_other = load_scale(other_place + (following // Q_D) * S_D, columns < N)
        if IS_INTERPRETED:
            row, tile = row.to(tl.float32), tile.to(tl.float32)
        part = tl.dot(row, tile)
        if TWO:
            part, other_part = tl.split(tl.permute(tl.reshape(part, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
            other_acc = _add(other_acc, other_part, row_scale, other, ONE_SCALE)
        acc = _add(acc, part, row_scale, value, ONE_SCALE)
        row_scale, value, other = next_row_scale, next_value, next_other
    return acc, other_acc


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def up_e4m3(
    x, x_scale, tiles, weight, scale, bias, out, out_scale, num_pairs, num_tiles,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr, BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    ROW_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, ONE_SCALE: tl.constexpr, DESCRIBED: tl.constexpr,
):
    """First product and gate: E4M3 tokens (T, H) to E4M3 sorted rows (S, I), whose groups are BLOCK_N columns."""
    tile, block = tile_and_block(tl.program_id(0), (INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    if expert >= 0:
        token_M = (pair_M // K).to(tl.int64)
        WIDTH: tl.constexpr = INNER if GATE == "none" else 2 * INNER
        COLUMNS: tl.constexpr = 2 * BLOCK_N if GATE == "pairs" else BLOCK_N
        GROUPS: tl.constexpr = (HIDDEN + ROW_GROUP - 1) // ROW_GROUP
        acc, linear = _product(
            x + token_M * HIDDEN, 0, x_scale + token_M * GROUPS, mask_M, weight, scale, expert,
            block * COLUMNS, HIDDEN, WIDTH, W_E, W_N, W_D, INNER, S_E, S_N, S_D, Q_N, Q_D, ROW_GROUP,
            BLOCK_M, COLUMNS, BLOCK_D, EVEN, GATE == "halves", ONE_SCALE, DESCRIBED, True)
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if GATE == "pairs":
            acc, linear = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        if bias is not None:
            step: tl.constexpr = 2 if GATE == "pairs" else 1
            acc += load_bias(bias, expert, step * column_N, WIDTH, BIAS_E, BIAS_N)[None, :]
            if GATE != "none":
                second: tl.constexpr = 1 if GATE == "pairs" else INNER
                linear += load_bias(bias, expert, step * column_N + second, WIDTH, BIAS_E, BIAS_N)[None, :]
        if GATE == "none":
            acc = activate(acc, ACTIVATION)
        else:
            acc = gate_pair(acc, linear, ACTIVATION, LIMIT, ALPHA)
        # Of columns behind the last no number may count for the scale.
        acc = tl.where((column_N < INNER)[None, :], acc, 0.0)
        values, scales = to_e4m3(acc, BLOCK_N)
        store_rows(out, values, row_M, mask_M, column_N, INNER)
        blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
        tl.store(out_scale + row_M.to(tl.int64)[:, None] * blocks + block + tl.arange(0, 1)[None, :], scales,
                 mask=mask_M[:, None])


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def down_e4m3(
    a, a_scale, tiles, weight, scale, bias, slots, num_pairs, num_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr, BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    ROW_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, ONE_SCALE: tl.constexpr, DESCRIBED: tl.constexpr,
):
    """Second product, not yet weighted: E4M3 sorted rows (S, I) to a row of every pair (S, H)."""
    tile, block = tile_and_block(tl.program_id(0), (HIDDEN + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    if expert >= 0:
        first = tl.load(tiles + num_pairs + num_tiles + tile)
        GROUPS: tl.constexpr = (INNER + ROW_GROUP - 1) // ROW_GROUP
        acc, _unused = _product(
            a if DESCRIBED else a + row_M.to(tl.int64) * INNER, first, a_scale + row_M.to(tl.int64) * GROUPS, mask_M,
            weight, scale, expert,
            block * BLOCK_N, INNER, HIDDEN, W_E, W_N, W_D, 0, S_E, S_N, S_D, Q_N, Q_D, ROW_GROUP,
            BLOCK_M, BLOCK_N, BLOCK_D, EVEN, False, ONE_SCALE, DESCRIBED, not DESCRIBED)
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += load_bias(bias, expert, column_N, HIDDEN, BIAS_E, BIAS_N)[None, :]
        store_rows(slots, acc, pair_M, mask_M, column_N, HIDDEN)
