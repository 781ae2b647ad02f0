"""From the gradient of a call's result back to that of the first product, by tile, as Triton kernels.

Letters as in kernels/experts.py, and N columns of the first product (2I gated, else I). A program computes a tile of
g Wd, g being the result's gradient at the tokens of one expert's rows, not yet times the routing weight; takes the
first product u, from which it works out the gated units a again; and leaves

* ``u_grad`` (S, N), sorted: w * (g Wd) * gate'(u), the gradient of u;
* ``scaled`` (S, I), sorted: w * a, whose products with g sum to the gradient of Wd;
* ``partial`` (parts, S), in pair order: the part of its columns in sum((g Wd) * a), the gradient of w.

Each of the three may be None. Large calls do it in two: g Wd by kernels/large.py, then ``rows_through_gate``, whose
loads and stores nothing waits behind; what stands between is rounded to the dtype of the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.gates import activate, activation_slope, gate_pair, gate_slopes
from routed_experts.kernels.product import product
from routed_experts.kernels.rows import load_expert, rows_of_tile, tile_and_block
from routed_experts.kernels.units import load_pair, store_pair, store_rows

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def _columns_through_gate(
    acc, u, weights, u_grad, scaled, pair_M, row_M, mask_M, block,
    K: tl.constexpr, INNER: tl.constexpr, WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """From a tile of g Wd (M, N) to ``u_grad`` and ``scaled``; return its rows' sums for ``partial``.

    ``block`` counts blocks of this width.
    """
    column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    place_M = weights + (pair_M // K).to(tl.int64) * WEIGHTS_T + (pair_M % K) * WEIGHTS_K
    weight_M = tl.load(place_M, mask=mask_M, other=0.0).to(tl.float32)
    if GATE == "none":
        mask = mask_M[:, None] & (column_N < INNER)[None, :]
        place = u + row_M[:, None].to(tl.int64) * INNER + column_N[None, :]
        unit = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        value = activate(unit, ACTIVATION)
    else:
        gate, linear = load_pair(u, row_M, mask_M, block, GATE, INNER, BLOCK_M, BLOCK_N)
        value = gate_pair(gate, linear, ACTIVATION, LIMIT, ALPHA)
    # Behind the last column acc is 0, so nothing is added there.
    sum_M = tl.sum(acc * value, axis=1)
    if scaled is not None:
        store_rows(scaled, value * weight_M[:, None], row_M, mask_M, column_N, INNER)
    if u_grad is not None:
        acc = acc * weight_M[:, None]
        if GATE == "none":
            store_rows(u_grad, acc * activation_slope(unit, ACTIVATION), row_M, mask_M, column_N, INNER)
        else:
            by_gate, by_linear = gate_slopes(gate, linear, ACTIVATION, LIMIT, ALPHA)
            store_pair(u_grad, acc * by_gate, acc * by_linear, row_M, mask_M, block, GATE, INNER, BLOCK_M, BLOCK_N)
    return sum_M


@triton.jit
def _through_gate(
    acc, u, weights, u_grad, scaled, partial, pair_M, row_M, mask_M, block, num_pairs,
    K: tl.constexpr, INNER: tl.constexpr, WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The same in two halves, one after the other: registers do not hold a wide tile and its gates together."""
    HALF: tl.constexpr = BLOCK_N // 2
    first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    for half in tl.static_range(2):
        place, tile = 2 * block + half, first if half == 0 else second
        sum_M = _columns_through_gate(tile, u, weights, u_grad, scaled, pair_M, row_M, mask_M, place,
                                      K, INNER, WEIGHTS_T, WEIGHTS_K, GATE, ACTIVATION, LIMIT, ALPHA, BLOCK_M, HALF)
        if partial is not None:
            tl.store(partial + place.to(tl.int64) * num_pairs + pair_M, sum_M, mask=mask_M)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"], do_not_specialize_on_alignment=["weights"])
def units_gradient(
    grad, tiles, weight, u, weights, u_grad, scaled, partial, num_pairs, num_tiles,
    K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    W_E: tl.constexpr, W_N: tl.constexpr, W_D: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):
    """grad (T, H) and u (S, N) to the gradient of u, by tile."""
    tile, block = tile_and_block(tl.program_id(0), (INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert, pair_M, row_M, mask_M = rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M)
    if expert >= 0:
        rows_M = grad + (pair_M // K).to(tl.int64) * HIDDEN
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        begin, end = tl.full((), 0, tl.int32), tl.full((), HIDDEN, tl.int32)
        acc = product(rows_M, mask_M, weight + expert.to(tl.int64) * W_E, column_N, begin, end, HIDDEN, INNER,
                      1, W_N, W_D, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, SWAP, PRECISION)
        _through_gate(acc, u, weights, u_grad, scaled, partial, pair_M, row_M, mask_M, block, num_pairs,
                      K, INNER, WEIGHTS_T, WEIGHTS_K, GATE, ACTIVATION, LIMIT, ALPHA, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids", "weights"])
def rows_through_gate(
    back, tiles, ids, u, weights, u_grad, scaled, partial, num_pairs,
    K: tl.constexpr, E: tl.constexpr, INNER: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """``back`` = g Wd (S, I), sorted, to the same; ``scaled`` may stand where ``back`` does, ``partial`` is (1, S)."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row_M < num_pairs
    pair_M = tl.load(tiles + row_M, mask=exists, other=0)
    mask_M = load_expert(ids, pair_M, K, E, IDS_T, IDS_K, exists) >= 0
    total_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for block in range((INNER + BLOCK_N - 1) // BLOCK_N):
        column_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        place = back + row_M[:, None].to(tl.int64) * INNER + column_N[None, :]
        acc = tl.load(place, mask=mask_M[:, None] & (column_N < INNER)[None, :], other=0.0).to(tl.float32)
        # Before another thread writes ``scaled`` there.
        tl.debug_barrier()
        total_M += _columns_through_gate(acc, u, weights, u_grad, scaled, pair_M, row_M, mask_M, block,
                                         K, INNER, WEIGHTS_T, WEIGHTS_K, GATE, ACTIVATION, LIMIT, ALPHA,
                                         BLOCK_M, BLOCK_N)
    if partial is not None:
        tl.store(partial + pair_M, total_M, mask=mask_M)
