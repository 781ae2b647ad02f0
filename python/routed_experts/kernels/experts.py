"""The two products of an expert, gate and routing weight included, as Triton kernels.

Letters: T tokens, K slots a token, S = T*K pairs, H hidden size, I intermediate size, M rows of a tile, N columns
of a tile, D the summed dimension (H up, I down).

A program computes one tile: some rows of one expert, and BLOCK_N of its columns. Where its rows come from is
the difference between the two regimes:

* by pair (few pairs): no sort. Program ``p`` of axis 0 stands for pair ``p``; the first pair of each expert leads
  and takes every row of that expert, so that weights are read once for each distinct expert. Axis 1 is the column
  block. Rows between the two products are numbered by pair.
* by tile: a program takes one of the tiles of :func:`kernels.layout.sorted_tiles`, which says in what order they
  come, and one column block. Rows between the products are the sorted ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.gates import activate, gate_pair
from routed_experts.kernels.product import load_bias
from routed_experts.kernels.quantized_product import any_product, length_of_rows
from routed_experts.kernels.rows import pairs_of_ranks, rows_of_pair, rows_of_tile, tile_and_block
from routed_experts.kernels.units import store_pair, store_rows
from routed_experts.kernels.weigh import weigh_block

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def _up_tile(
    x, weight, scale, bias, out, raw, expert, pair_M, row_M, mask_M, block,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    X_T: tl.constexpr, X_H: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):
    """One tile of the first product and its gate.

    GATE: ``none`` stores act(u), ``raw`` u itself for a gate of the user's own; ``halves`` and ``pairs`` say where
    gate and up stand among the 2I columns. Column j of the product is column j//2 of its half, so that a thread
    holds both parts of a gated unit. ``raw``, unless it is None, gets u beside the gated units.
    """
    rows_M = x + (pair_M // K).to(tl.int64) * X_T
    matrix = weight + expert.to(tl.int64) * W_E
    if FORMAT is not None:
        scale += expert.to(tl.int64) * S_E
    begin, end = tl.full((), 0, tl.int32), tl.full((), HIDDEN, tl.int32)
    if GATE == "none" or GATE == "raw":
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = any_product(rows_M, mask_M, matrix, scale, column_N, begin, end, HIDDEN, INNER, X_H, W_N, W_D,
                          FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
        if bias is not None:
            acc += load_bias(bias, expert, column_N, INNER, BIAS_E, BIAS_N)[None, :]
        if raw is not None:
            store_rows(raw, acc, row_M, mask_M, column_N, INNER)
        if GATE == "none":
            acc = activate(acc, ACTIVATION)
    elif GATE == "halves" and W_D != 1:
        # Columns are contiguous: two products, for one over both halves would read single elements.
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        upper = matrix + INNER * W_N
        upper_scale = scale
        if FORMAT is not None:
            upper_scale += (INNER // Q_N) * S_N
        gate = any_product(rows_M, mask_M, matrix, scale, column_N, begin, end, HIDDEN, INNER, X_H, W_N, W_D,
                           FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
        linear = any_product(rows_M, mask_M, upper, upper_scale, column_N, begin, end, HIDDEN, INNER, X_H, W_N, W_D,
                             FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
        if bias is not None:
            gate += load_bias(bias, expert, column_N, INNER, BIAS_E, BIAS_N)[None, :]
            linear += load_bias(bias + INNER * BIAS_N, expert, column_N, INNER, BIAS_E, BIAS_N)[None, :]
        if raw is not None:
            store_pair(raw, gate, linear, row_M, mask_M, block, GATE, INNER, BLOCK_M, BLOCK_N)
        acc = gate_pair(gate, linear, ACTIVATION, LIMIT, ALPHA)
    else:
        both = block * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        if GATE == "halves":
            # Behind the last unit no column of the other half may be taken for one.
            both = tl.where(both < 2 * INNER, (both % 2) * INNER + both // 2, 2 * INNER)
        acc = any_product(rows_M, mask_M, matrix, scale, both, begin, end, HIDDEN, 2 * INNER, X_H, W_N, W_D,
                          FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, 2 * BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
        if bias is not None:
            acc += load_bias(bias, expert, both, 2 * INNER, BIAS_E, BIAS_N)[None, :]
        gate, linear = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        if raw is not None:
            store_pair(raw, gate, linear, row_M, mask_M, block, GATE, INNER, BLOCK_M, BLOCK_N)
        acc = gate_pair(gate, linear, ACTIVATION, LIMIT, ALPHA)
    store_rows(out, acc, row_M, mask_M, block * BLOCK_N + tl.arange(0, BLOCK_N), INNER)


@triton.jit
def _down_tile(
    a, weight, scale, bias, slots, expert, pair_M, row_M, mask_M, block, num_pairs,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):
    """One tile of the second product over one of SPLIT parts of I, not yet weighted."""
    LENGTH: tl.constexpr = length_of_rows(INNER, FORMAT, NARROW)
    rows_M = a + row_M.to(tl.int64) * LENGTH
    matrix = weight + expert.to(tl.int64) * W_E
    if FORMAT is not None:
        scale += expert.to(tl.int64) * S_E
    column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    part: tl.constexpr = (INNER + SPLIT * BLOCK_D - 1) // (SPLIT * BLOCK_D) * BLOCK_D
    split = tl.program_id(2)
    begin = split * part
    end = tl.minimum(begin + part, INNER)
    acc = any_product(rows_M, mask_M, matrix, scale, column_N, begin, end, INNER, HIDDEN, 1, W_N, W_D,
                      FORMAT, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)
    if bias is not None:
        value = load_bias(bias, expert, column_N, HIDDEN, BIAS_E, BIAS_N)[None, :]
        acc += tl.where(split == 0, value, 0.0)
    slot_M = split * num_pairs.to(tl.int64) + pair_M
    place = slots + slot_M[:, None] * HIDDEN + column_N[None, :]
    tl.store(place, acc.to(slots.dtype.element_ty), mask=mask_M[:, None] & (column_N < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def up_by_pair(
    x, ids, weight, scale, bias, out, arrived, num_pairs,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    X_T: tl.constexpr, X_H: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, COUNTERS: tl.constexpr,
):
    """First product and gate, by pair; also clears the counters of the second launch."""
    pair = tl.program_id(0)
    if (pair == 0) & (tl.program_id(1) == 0):
        tl.store(arrived + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), dtype=tl.int32))
    expert, rank_S, count = rows_of_pair(ids, pair, num_pairs, K, E, IDS_T, IDS_K, BLOCK_S)
    for begin in range(0, count, BLOCK_M):
        pair_M = pairs_of_ranks(rank_S, begin, BLOCK_M, BLOCK_S)
        mask_M = begin + tl.arange(0, BLOCK_M) < count
        _up_tile(x, weight, scale, bias, out, None, expert, pair_M, pair_M, mask_M, tl.program_id(1),
                 K, HIDDEN, INNER, X_T, X_H, W_E, W_N, W_D, BIAS_E, BIAS_N,
                 FORMAT, S_E, S_N, S_D, Q_N, Q_D, GATE, ACTIVATION, LIMIT, ALPHA,
                 BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids", "weights"])
def down_by_pair(
    a, ids, weights, weight, scale, bias, slots, arrived, out, num_pairs,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Second product by pair, and the weighted sum: the last program to arrive at a column block sums it.

    Which program is last varies, what it computes does not: slots are summed in slot order.
    """
    pair = tl.program_id(0)
    block = tl.program_id(1)
    expert, rank_S, count = rows_of_pair(ids, pair, num_pairs, K, E, IDS_T, IDS_K, BLOCK_S)
    for begin in range(0, count, BLOCK_M):
        pair_M = pairs_of_ranks(rank_S, begin, BLOCK_M, BLOCK_S)
        mask_M = begin + tl.arange(0, BLOCK_M) < count
        _down_tile(a, weight, scale, bias, slots, expert, pair_M, pair_M, mask_M, block, num_pairs, HIDDEN, INNER,
                   W_E, W_N, W_D, BIAS_E, BIAS_N,
                   FORMAT, S_E, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, SPLIT, EVEN, SWAP, NARROW, PRECISION)
    # Every thread's stores come before the one thread's release.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) * SPLIT - 1:
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        num_tokens = num_pairs // K
        for begin in range(0, num_tokens, BLOCK_T):
            weigh_block(slots, ids, weights, out, begin + tl.arange(0, BLOCK_T), column_N, num_tokens, num_pairs,
                         K, E, HIDDEN, IDS_T, IDS_K, WEIGHTS_T, WEIGHTS_K, BLOCK_T, BLOCK_N, SPLIT)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def up_by_tile(
    x, tiles, weight, scale, bias, out, raw, num_pairs, num_tiles,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    X_T: tl.constexpr, X_H: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):
    """First product and gate, by tile; the product itself to ``raw`` (S, N) too, unless that is None."""
    tile, block = tile_and_block(tl.program_id(0), (INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    if expert >= 0:
        _up_tile(x, weight, scale, bias, out, raw, expert, pair_M, row_M, mask_M, block,
                 K, HIDDEN, INNER, X_T, X_H, W_E, W_N, W_D, BIAS_E, BIAS_N,
                 FORMAT, S_E, S_N, S_D, Q_N, Q_D, GATE, ACTIVATION, LIMIT, ALPHA,
                 BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, NARROW, PRECISION)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def down_by_tile(
    a, tiles, weight, scale, bias, slots, num_pairs, num_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    BIAS_E: tl.constexpr, BIAS_N: tl.constexpr,
    FORMAT: tl.constexpr, S_E: tl.constexpr, S_N: tl.constexpr, S_D: tl.constexpr, Q_N: tl.constexpr, Q_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):
    """Second product by tile, not yet weighted: sorted rows to a row of every pair."""
    tile, block = tile_and_block(tl.program_id(0), (HIDDEN + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    if expert >= 0:
        _down_tile(a, weight, scale, bias, slots, expert, pair_M, row_M, mask_M, block, num_pairs, HIDDEN, INNER,
                   W_E, W_N, W_D, BIAS_E, BIAS_N,
                   FORMAT, S_E, S_N, S_D, Q_N, Q_D, BLOCK_M, BLOCK_N, BLOCK_D, 1, EVEN, SWAP, NARROW, PRECISION)
