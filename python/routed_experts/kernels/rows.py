"""Which rows a program computes: found among unsorted ids, or read from a list of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def load_expert(ids, pair, K: tl.constexpr, E: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr, mask):
    """Experts of pairs; -1 for a sentinel and where the mask is off."""
    token, slot = pair // K, pair % K
    expert = tl.load(ids + token.to(tl.int64) * IDS_T + slot.to(tl.int64) * IDS_K, mask=mask, other=0).to(tl.int64)
    return tl.where(mask & (expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def rows_of_pair(
    ids, pair, num_pairs,
    K: tl.constexpr, E: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """Expert of a pair, the rank of every pair among that expert's (else -1), and the count; 0 unless it leads."""
    other = tl.arange(0, BLOCK_S)
    expert_S = load_expert(ids, other, K, E, IDS_T, IDS_K, other < num_pairs)
    expert = tl.sum(tl.where(other == pair, expert_S, 0), axis=0)
    same = (expert_S == expert) & (other < num_pairs)
    first = tl.min(tl.where(same, other, BLOCK_S), axis=0)
    count = tl.where((expert >= 0) & (first == pair), tl.sum(same.to(tl.int32), axis=0), 0)
    rank_S = tl.where(same, tl.cumsum(same.to(tl.int32), axis=0) - 1, -1)
    return expert, rank_S, count


@triton.jit
def pairs_of_ranks(rank_S, begin, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """The pairs whose rank is begin..begin+BLOCK_M-1, in order; 0 behind the last."""
    rank_M = begin + tl.arange(0, BLOCK_M)
    chosen = rank_S[None, :] == rank_M[:, None]
    return tl.sum(tl.where(chosen, tl.arange(0, BLOCK_S)[None, :], 0), axis=1)


@triton.jit
def tile_and_block(program, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column block of a program.

    GROUP tiles go through all BLOCKS together, tile by tile for each block: tiles of one expert then find its
    weights in L2, and the tiles themselves stay there from block to block.
    """
    group = program // (GROUP * BLOCKS)
    within = program % (GROUP * BLOCKS)
    return group * GROUP + within % GROUP, within // GROUP


@triton.jit
def rows_in_tile(tiles, tile, num_pairs, num_tiles):
    """How many rows a tile has, 0 where there is none; see ``rows_of_tile``."""
    return tl.load(tiles + num_pairs + 2 * num_tiles + tile, mask=tile < num_tiles, other=0)


@triton.jit
def rows_of_tile(tiles, tile, num_pairs, num_tiles, BLOCK_M: tl.constexpr):
    """Expert of a tile, -1 if it has none; its pairs, its sorted rows, and which of them there are.

    ``tiles`` holds the fields of :class:`kernels.layout.Tiles` one behind the other: order, expert, first, rows.
    """
    fields = tiles + num_pairs
    exists = tile < num_tiles
    expert = tl.load(fields + tile, mask=exists, other=-1)
    first = tl.load(fields + num_tiles + tile, mask=exists, other=0)
    row_M = tl.arange(0, BLOCK_M)
    mask_M = row_M < tl.load(fields + 2 * num_tiles + tile, mask=exists, other=0)
    return expert, tl.load(tiles + first + row_M, mask=mask_M, other=0), first + row_M, mask_M
