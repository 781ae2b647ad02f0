"""Expert ids to sorted rows on a CUDA device, in Triton: one launch up to SMALL_PAIRS pairs, three for more.

Same letters and same bits as :mod:`routed_experts.layout`. No host sync, no atomics, one allocation for all
outputs (and one of scratch for large S), so a CUDA graph can capture it; what is launched depends on shapes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from routed_experts.kernels.launch import Launch, device_of, launch
from routed_experts.kernels.layout_kernels import count_chunks, place_chunks, sort_small, sum_chunks
from routed_experts.layout_device import layout_sizes

MOST_EXPERTS = 4096
MOST_ROWS = 2**31 - 2**16  # int32 rows, less what a loop may step past the last one
# Measured on an H200: beyond these pairs three launches are faster than one whose work grows with the square.
_SHIFT = 12
SMALL_PAIRS = 2**_SHIFT
_QUERIES_SMALL = 16
_KEYS = 256
_OWN, _WIDTH = 16, 64
_COLUMNS = 4


class Tiles(NamedTuple):
    """Rows sorted by expert, cut into tiles of at most B = ``block_rows`` rows of one expert; all int32.

    N = (S + min(S, E) * (B - 1)) // B tiles, whatever the ids. Their order: the expert with the most rows first, of
    equals the one with the smaller id, and of one expert the first rows first; then groups of eight tiles from the
    first and from the second half take turns, and fewer than eight that are left stay behind.

    Attributes:
        order: (S,) sorted row -> pair; stable, sentinels last in pair order.
        expert: (N,) expert of each tile, -1 behind the last tile in use.
        first: (N,) first sorted row of each tile, 0 behind the last.
        rows: (N,) rows of each tile, 1..B, 0 behind the last.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    rows: Tensor


def usable() -> bool:
    """Whether Triton can build and launch here: an SM80 or newer, and a C compiler or what one left in its cache."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except Exception:  # Triton lets through whatever its build raises; all of it means that it cannot run here.
        return False
    return target.backend == "cuda" and target.arch >= 80


def takes(pairs: int, num_experts: int, unit: int) -> bool:
    """Whether these kernels reach: at most 4096 experts, and rows, padded to the unit, numbered in int32."""
    return num_experts <= MOST_EXPERTS and pairs + min(pairs, num_experts) * (unit - 1) <= MOST_ROWS


def device_layout(top_k_index: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    """Return order, inverse, counts, offsets and, at an alignment above 1, starts, row_expert and block_expert.

    Args:
        top_k_index: (T, K) ids of any integer dtype and any strides.
        num_experts: E, 1..4096.
        alignment: A, at least 1; :func:`takes` must hold.

    Returns:
        int32 tensors of the lengths of :func:`layout_sizes`, which share one allocation.
    """
    sizes = layout_sizes(top_k_index.numel(), num_experts, alignment)
    out = top_k_index.new_empty(sum(sizes), dtype=torch.int32)
    _launch_all(top_k_index, out, num_experts, alignment, tiles=False)
    return list(torch.unsafe_split_with_sizes(out, sizes))


def sorted_tiles(top_k_index: Tensor, num_experts: int, block_rows: int) -> Tiles:
    """Sort the pairs of a routing by expert and cut the rows into tiles for a grouped product.

    Args:
        top_k_index: (T, K) ids of any integer dtype and any strides.
        num_experts: E, 1..4096.
        block_rows: B, at least 1; :func:`takes` must hold.

    Returns:
        :class:`Tiles`, whose tensors share one allocation.
    """
    sizes = tile_sizes(top_k_index.numel(), num_experts, block_rows)
    out = top_k_index.new_empty(sum(sizes), dtype=torch.int32)
    _launch_all(top_k_index, out, num_experts, block_rows, tiles=True)
    return Tiles(*torch.unsafe_split_with_sizes(out, sizes))


def tile_sizes(pairs: int, num_experts: int, block_rows: int) -> list[int]:
    """Lengths of the four fields of :class:`Tiles`, in the order in which they lie in the output."""
    tiles = (pairs + min(pairs, num_experts) * (block_rows - 1)) // block_rows
    return [pairs, tiles, tiles, tiles]


def scratch_size(pairs: int, num_experts: int) -> int:
    """How many int32 :func:`launches` need beside the output: none for few pairs."""
    if pairs <= SMALL_PAIRS:
        return 0
    return (2 * _chunks(pairs, num_experts) + 1) * (num_experts + 1)


def launches(
    ids: Tensor, out: Tensor, scratch: Tensor, num_experts: int, unit: int, *, tiles: bool
) -> Iterator[Launch]:
    """Yield the launches that fill ``out``, in order.

    Args:
        ids: (T, K) ids.
        out: int32, contiguous, as long as :func:`layout_sizes` (or, for tiles, :func:`tile_sizes`) say in sum.
        scratch: int32, as long as :func:`scratch_size` says.
        num_experts: E.
        unit: the alignment, or the rows of a tile.
        tiles: fill the fields of :class:`Tiles` and not those of a layout.
    """
    pairs = ids.numel()
    sizes = (pairs, max(ids.shape[1], 1), *ids.stride())
    warps = 4 if num_experts <= 1024 else 8
    constants = constants_of(num_experts, unit, tiles, 512 if pairs <= 512 else 1024)
    if pairs <= SMALL_PAIRS:
        programs = constants["PROGRAMS"] + triton.cdiv(pairs, _QUERIES_SMALL)
        yield Launch(sort_small, (programs, 1, 1), (ids, out, *sizes), constants, warps)
        return
    queries, rows = _block_sizes(pairs)
    count, total, place = chunk_constants_of(num_experts, unit, tiles, queries, rows)
    chunks = _chunks(pairs, num_experts)
    yield Launch(count_chunks, (chunks, 1, 1), (ids, scratch, *sizes), count, warps)
    yield Launch(sum_chunks, (triton.cdiv(num_experts + 1, _COLUMNS), 1, 1), (scratch, chunks), total, warps)
    programs = place["PROGRAMS"] + triton.cdiv(pairs, queries)
    yield Launch(place_chunks, (programs, 1, 1), (ids, out, scratch, *sizes, chunks), place, warps)


def _block_sizes(pairs: int) -> tuple[int, int]:
    """Pairs that a program places, and chunks that one adds at a time: a device full of programs, not many more."""
    if pairs <= 2**14:
        return 32, 128
    return (128, 128) if pairs <= 2**16 else (256, 512)


def _chunk(num_experts: int) -> int:
    # A pair is compared with its chunk, and a chunk costs two numbers of scratch for each expert.
    return 256 if num_experts <= 512 else 1024


def _chunks(pairs: int, num_experts: int) -> int:
    return int(triton.cdiv(pairs, _chunk(num_experts)))


@functools.cache
def constants_of(num_experts: int, unit: int, tiles: bool, keys: int) -> dict[str, int]:
    """Constants of ``sort_small``."""
    shared = _shared_constants(num_experts, unit, tiles)
    return {**shared, "QUERIES": _QUERIES_SMALL, "KEYS": keys, "SHIFT": _SHIFT}


@functools.cache
def chunk_constants_of(num_experts: int, unit: int, tiles: bool, queries: int, rows: int) -> tuple[dict[str, int], ...]:
    """Constants of ``count_chunks``, ``sum_chunks`` and ``place_chunks``."""
    shared = _shared_constants(num_experts, unit, tiles)
    chunk = {"CHUNK": _chunk(num_experts)}
    count = {"E": num_experts, "EP": shared["EP"], **chunk}
    total = {"E": num_experts, "COLUMNS": _COLUMNS, "ROWS": rows}
    return count, total, {**shared, "QUERIES": queries, "KEYS": _KEYS, **chunk}


def _shared_constants(num_experts: int, unit: int, tiles: bool) -> dict[str, int]:
    # Without units one program writes all that is said of experts.
    programs = triton.cdiv(num_experts, _OWN) if tiles or unit > 1 else 1
    widened = max(32, triton.next_power_of_2(num_experts))
    sizes = {"E": num_experts, "EP": widened, "U": unit, "TILES": tiles}
    return {**sizes, "PROGRAMS": programs, "OWN": _OWN, "WIDTH": _WIDTH}


def _launch_all(ids: Tensor, out: Tensor, num_experts: int, unit: int, *, tiles: bool) -> None:
    scratch = torch.empty(scratch_size(ids.numel(), num_experts), dtype=torch.int32, device=ids.device)
    with device_of(ids):
        for one in launches(ids, out, scratch, num_experts, unit, tiles=tiles):
            launch(one)
