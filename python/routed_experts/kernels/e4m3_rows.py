"""Tokens to E4M3 rows that are sorted by expert, one for each pair: what TMA, which cannot gather, fetches."""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.decode import to_e4m3

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit(do_not_specialize=["num_pairs"])
def places_of_pairs(tiles, places, num_pairs, BLOCK_S: tl.constexpr):
    """The sorted row of every pair, (S,), from the order that ``tiles`` begins with."""
    row_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = row_S < num_pairs
    tl.store(places + tl.load(tiles + row_S, mask=mask, other=0), row_S, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def quantize_to_rows(
    x, places, out, scale, num_rows, num_pairs,
    K: tl.constexpr, WIDTH: tl.constexpr, X_T: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Tokens (T, H) to the K sorted rows of each, (S, H) in E4M3, and scales (H / GROUP, S)."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row_M < num_rows)[:, None] & (column_N < WIDTH)[None, :]
    tile = tl.load(x + row_M[:, None].to(tl.int64) * X_T + column_N[None, :], mask=mask, other=0.0).to(tl.float32)
    values, scales = to_e4m3(tile, GROUP)
    group = tl.program_id(1) * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
    mask_scale = (row_M < num_rows)[:, None] & (group < WIDTH // GROUP)[None, :]
    for slot in range(K):
        place_M = tl.load(places + row_M * K + slot, mask=row_M < num_rows, other=0).to(tl.int64)
        tl.store(out + place_M[:, None] * WIDTH + column_N[None, :], values, mask=mask)
        tl.store(scale + group[None, :] * num_pairs.to(tl.int64) + place_M[:, None], scales, mask=mask_scale)
