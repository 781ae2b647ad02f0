"""The launches of a call whose rows are multiplied as E4M3 numbers; see kernels/e4m3.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from routed_experts.kernels import descriptors, e4m3, mlp
from routed_experts.kernels.choice import Choice, Sizes, num_tiles, sizes_of
from routed_experts.kernels.configs import Config
from routed_experts.kernels.constants import GROUP, gate_constants, row_stride, tile_grid
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches as layout_launches
from routed_experts.kernels.layout import scratch_size, tile_sizes
from routed_experts.kernels.matrices import Matrix, down_matrix, up_matrix
from routed_experts.kernels.memory import Piece
from routed_experts.kernels.quantized_configs import ROW_GROUP
from routed_experts.weights import ExpertWeights


def pieces_of(choice: Choice, sizes: Sizes, dtype: torch.dtype) -> list[Piece]:
    """Scratch memory of a call: tokens and gated units with their scales, the slots, and what finds the rows."""
    width = triton.cdiv(sizes.hidden, ROW_GROUP), triton.cdiv(sizes.inner, choice.up.columns)
    return [
        Piece((sizes.tokens, sizes.hidden), torch.float8_e4m3fn),
        Piece((sizes.tokens, width[0]), torch.float32),
        Piece((sizes.pairs, sizes.inner), torch.float8_e4m3fn),
        Piece((sizes.pairs, width[1]), torch.float32),
        Piece((sizes.pairs, sizes.hidden), dtype),
        Piece((sum(tile_sizes(sizes.pairs, sizes.experts, choice.up.rows)),), torch.int32),
        Piece((scratch_size(sizes.pairs, sizes.experts),), torch.int32),
    ]


def launches_of(
    experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, weights: Tensor, made: list[Tensor], out: Tensor
) -> Iterator[Launch]:
    """The kernels of a call, in order; ``made`` is the memory of :func:`pieces_of`."""
    rows, row_scale, a, a_scale, slots, tiles, chunks = made
    sizes = sizes_of(experts, ids)
    yield quantize(x, rows, row_scale)
    yield from layout_launches(ids, tiles, chunks, sizes.experts, choice.up.rows, tiles=True)
    yield _up(experts, choice, sizes, rows, row_scale, tiles, a, a_scale)
    yield _down(experts, choice, sizes, a, a_scale, tiles, slots)
    yield mlp.weigh(slots, ids, weights, out, sizes.experts)


def quantize(x: Tensor, out: Tensor, scale: Tensor) -> Launch:
    """Rows (T, H) to E4M3 (T, H) and scales (T, H / ROW_GROUP)."""
    tokens, width = x.shape
    columns = max(ROW_GROUP, min(1024, triton.next_power_of_2(width)))
    rows = max(1, 2048 // columns)
    constants = {"WIDTH": width, "X_T": row_stride(x), "GROUP": ROW_GROUP, "BLOCK_M": rows, "BLOCK_N": columns}
    grid = (triton.cdiv(tokens, rows), triton.cdiv(width, columns), 1)
    return Launch(e4m3.quantize_rows, grid, (x, out, scale, tokens), constants)


def _up(
    experts: ExpertWeights,
    choice: Choice,
    sizes: Sizes,
    x: Tensor,
    x_scale: Tensor,
    tiles: Tensor,
    a: Tensor,
    a_scale: Tensor,
) -> Launch:
    config, matrix, gate = choice.up, up_matrix(experts), gate_constants(experts, False)
    config = config._replace(depth=min(config.depth, ROW_GROUP))
    halves, pairs = gate["GATE"] == "halves", gate["GATE"] == "pairs"
    width = sizes.inner * (2 if pairs else 1)
    columns = config.columns * (2 if pairs else 1)
    constants = {
        **_constants(matrix, config, sizes.hidden, width, columns, choice.is_large),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": sizes.inner, "ROW_GROUP": ROW_GROUP, **gate},
    }
    # A block of both halves divides each of them, and the last tile of the first half reads into the second.
    constants["EVEN"] &= not halves or sizes.inner % columns == 0
    weight = matrix.weight
    if choice.is_large:
        weight = descriptors.up_descriptor(experts, gate["GATE"], config.columns, config.depth)
    scale, bias, number = matrix.scale, matrix.bias, num_tiles(sizes, config)
    arguments = (x, x_scale, tiles, weight, scale, bias, a, a_scale, sizes.pairs, number)
    grid = tile_grid(sizes, config, triton.cdiv(sizes.inner, config.columns))
    return Launch(e4m3.up_e4m3, grid, arguments, constants, config.warps, config.stages)


def _down(
    experts: ExpertWeights, choice: Choice, sizes: Sizes, a: Tensor, a_scale: Tensor, tiles: Tensor, slots: Tensor
) -> Launch:
    group = choice.up.columns
    config, matrix = choice.down._replace(depth=min(choice.down.depth, group)), down_matrix(experts)
    constants = {
        **_constants(matrix, config, sizes.inner, sizes.hidden, config.columns, choice.is_large),
        **{"HIDDEN": sizes.hidden, "INNER": sizes.inner, "ROW_GROUP": group},
    }
    rows, weight = a, matrix.weight
    if choice.is_large:
        rows = descriptors.rows_descriptor(a, config.rows, config.depth)
        weight = descriptors.matrix_descriptor(weight, False, config.columns, config.depth)
    arguments = (rows, a_scale, tiles, weight, matrix.scale, matrix.bias, slots, sizes.pairs, num_tiles(sizes, config))
    grid = tile_grid(sizes, config, triton.cdiv(sizes.hidden, config.columns))
    return Launch(e4m3.down_e4m3, grid, arguments, constants, config.warps, config.stages)


def _constants(
    matrix: Matrix, config: Config, depth: int, width: int, columns: int, is_described: bool
) -> dict[str, Any]:
    """Strides, scales and tile of a product of so many columns a program."""
    constants = {name: value for name, value in matrix.constants().items() if name != "FORMAT"}
    return {
        **constants,
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth, "GROUP": GROUP},
        "EVEN": depth % config.depth == 0 and width % columns == 0,
        # Whether all columns of a tile are in one block, which holds for a block that is as wide as a half too.
        "ONE_SCALE": matrix.block[0] > 0 and (matrix.block[0] % columns == 0 or matrix.block[0] >= width),
        "DESCRIBED": is_described,
    }
