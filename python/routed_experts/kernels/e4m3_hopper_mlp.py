"""The launches of a call of very many rows in E4M3 on Hopper; see kernels/e4m3_hopper.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from routed_experts.kernels import e4m3_rows, mlp
from routed_experts.kernels.choice import Choice, Sizes, num_tiles, sizes_of
from routed_experts.kernels.constants import GROUP, gate_constants, row_stride, tile_grid
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches as layout_launches
from routed_experts.kernels.layout import scratch_size, tile_sizes
from routed_experts.kernels.matrices import Matrix, down_matrix, up_matrix
from routed_experts.kernels.memory import Piece
from routed_experts.kernels.quantized_configs import ROW_GROUP
from routed_experts.weights import ExpertWeights

# Of 65536 a multiprocessor has, for 384 threads; then those of a warp that only fetches and of one that multiplies.
_REGISTERS, _FETCH_REGISTERS, _MULTIPLY_REGISTERS = 168, 24, 240
_HALF_ROWS = 64
# From this depth on a tile takes long enough that a program for each is as fast, and fills the last round better.
_DEEP = 4096


def pieces_of(choice: Choice, sizes: Sizes, dtype: torch.dtype) -> list[Piece]:
    """Scratch memory of a call: gated units, scales of them and of the rows, the slots, and what finds the rows.

    Rows, a byte a number, are where the slots will be: nobody reads them any more when those are written.
    """
    groups = triton.cdiv(sizes.hidden, ROW_GROUP), triton.cdiv(sizes.inner, ROW_GROUP)
    return [
        Piece((groups[0], sizes.pairs), torch.float32),
        Piece((sizes.pairs, sizes.inner), torch.float8_e4m3fn),
        Piece((groups[1], sizes.pairs), torch.float32),
        Piece((sizes.pairs, sizes.hidden), dtype),
        Piece((sum(tile_sizes(sizes.pairs, sizes.experts, choice.up.rows)),), torch.int32),
        Piece((sizes.pairs,), torch.int32),
        Piece((scratch_size(sizes.pairs, sizes.experts),), torch.int32),
    ]


def launches_of(
    experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, weights: Tensor, made: list[Tensor], out: Tensor
) -> Iterator[Launch]:
    """The kernels of a call, in order; ``made`` is the memory of :func:`pieces_of`."""
    row_scale, a, a_scale, slots, tiles, places, chunks = made
    sizes = sizes_of(experts, ids)
    rows = rows_in(slots)
    yield from layout_launches(ids, tiles, chunks, sizes.experts, choice.up.rows, tiles=True)
    yield from gather(x, sizes, tiles, places, rows, row_scale)
    yield up(experts, choice, sizes, rows, row_scale, tiles, a, a_scale)
    yield down(experts, choice, sizes, a, a_scale, tiles, slots)
    yield mlp.weigh(slots, ids, weights, out, sizes.experts)


def rows_in(slots: Tensor) -> Tensor:
    """Rows (S, H) in E4M3, in the memory of slots (S, H)."""
    return slots.view(torch.float8_e4m3fn).view(-1)[: slots.numel()].view(slots.shape)


def gather(x: Tensor, sizes: Sizes, tiles: Tensor, places: Tensor, rows: Tensor, scale: Tensor) -> Iterator[Launch]:
    """Tokens (T, H) to sorted rows (S, H) in E4M3 and scales (H / ROW_GROUP, S)."""
    block = 1024
    grid = (triton.cdiv(sizes.pairs, block), 1, 1)
    yield Launch(e4m3_rows.places_of_pairs, grid, (tiles, places, sizes.pairs), {"BLOCK_S": block})
    columns = max(ROW_GROUP, min(1024, triton.next_power_of_2(sizes.hidden)))
    tokens = max(1, 2048 // columns)
    constants = {
        **{"K": sizes.slots, "WIDTH": sizes.hidden, "X_T": row_stride(x), "GROUP": ROW_GROUP},
        **{"BLOCK_M": tokens, "BLOCK_N": columns},
    }
    grid = (triton.cdiv(sizes.tokens, tokens), triton.cdiv(sizes.hidden, columns), 1)
    yield Launch(e4m3_rows.quantize_to_rows, grid, (x, places, rows, scale, sizes.tokens, sizes.pairs), constants)


def up(
    experts: ExpertWeights,
    choice: Choice,
    sizes: Sizes,
    rows: Tensor,
    row_scale: Tensor,
    tiles: Tensor,
    a: Tensor,
    a_scale: Tensor,
) -> Launch:
    """First product and gate: sorted rows (S, H) to (S, I), with scales (I / ROW_GROUP, S)."""
    from routed_experts.kernels.e4m3_hopper import up_hopper

    matrix, config, gate = up_matrix(experts), choice.up, gate_constants(experts, False)
    del gate["GATE"]
    programs = tile_grid(sizes, config, triton.cdiv(sizes.inner, config.columns))[0]
    arguments = (
        *(_describe(rows, _HALF_ROWS), row_scale, tiles, _describe(matrix.weight.flatten(0, 1), ROW_GROUP)),
        *(matrix.scale, a, a_scale, sizes.pairs, num_tiles(sizes, config), programs),
    )
    more = {**gate, "STAGES": config.stages}
    return _launch(up_hopper, _beside(sizes.hidden, choice), sizes, matrix, arguments, more)


def down(
    experts: ExpertWeights, choice: Choice, sizes: Sizes, a: Tensor, a_scale: Tensor, tiles: Tensor, slots: Tensor
) -> Launch:
    """Second product: sorted rows (S, I) to slots (S, H), in pair order."""
    from routed_experts.kernels.e4m3_hopper import down_hopper

    matrix, config = down_matrix(experts), choice.down
    programs = tile_grid(sizes, config, triton.cdiv(sizes.hidden, config.columns))[0]
    arguments = (
        *(_describe(a, _HALF_ROWS), a_scale, tiles, _describe(matrix.weight.flatten(0, 1), ROW_GROUP)),
        *(matrix.scale, slots, sizes.pairs, num_tiles(sizes, config), programs),
    )
    more = {"STAGES": config.stages}
    return _launch(down_hopper, _beside(sizes.inner, choice), sizes, matrix, arguments, more)


def _beside(depth: int, choice: Choice) -> int | None:
    """Programs that take all tiles of a product of this depth, None for one a tile."""
    return None if depth >= _DEEP else choice.programs


def _launch(
    kernel: Any, programs: int | None, sizes: Sizes, matrix: Matrix, arguments: tuple[Any, ...], more: dict[str, Any]
) -> Launch:
    expert, column, depth = matrix.strides
    constants = {
        **{"HIDDEN": sizes.hidden, "INNER": sizes.inner, "S_E": expert, "S_N": column, "S_D": depth},
        **{"GROUP": GROUP, "FETCH_REGISTERS": _FETCH_REGISTERS, "REGISTERS": _MULTIPLY_REGISTERS, **more},
    }
    tiles = arguments[-1]
    grid = (tiles if programs is None else min(tiles, programs), 1, 1)
    return Launch(kernel, grid, arguments, constants, 4, 1, _REGISTERS)


def _describe(rows: Tensor, height: int) -> Any:
    """Descriptor of rows (N, D) of bytes, for tiles of so many of them and ROW_GROUP of their columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [height, ROW_GROUP], layout)
