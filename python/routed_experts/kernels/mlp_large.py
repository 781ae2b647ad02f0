"""The launches of the products of a large call, whose operands come through tensor descriptors."""

from __future__ import annotations

import triton
from torch import Tensor

from routed_experts.kernels import descriptors, large
from routed_experts.kernels.choice import Choice, Sizes, num_tiles, sizes_of
from routed_experts.kernels.constants import GROUP, bias_strides, gate_constants, row_stride, tile_grid
from routed_experts.kernels.launch import Launch
from routed_experts.weights import ExpertWeights


def up(
    experts: ExpertWeights,
    choice: Choice,
    x: Tensor,
    ids: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    is_raw: bool,
    raw: Tensor | None,
) -> Launch:
    """First product and its gate: x (T, H) to out (S, I), or (S, N) when raw, sorted; see kernels/mlp.py."""
    sizes, config, bias, gate = sizes_of(experts, ids), choice.up, experts.up_bias, gate_constants(experts, is_raw)
    constants = {
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": out.shape[1], "X_T": row_stride(x), "X_H": 1},
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth, "GROUP": GROUP},
        **{**bias_strides(bias), **gate, "TRANSPOSED": experts.is_transposed},
    }
    weight = descriptors.up_descriptor(experts, gate["GATE"], config.columns, config.depth)
    arguments = (x, tiles, weight, bias, out, raw, sizes.pairs, num_tiles(sizes, config))
    grid = tile_grid(sizes, config, triton.cdiv(out.shape[1], config.columns))
    return Launch(large.up_large, grid, arguments, constants, config.warps, config.stages)


def rows_by_tile(
    sizes: Sizes,
    choice: Choice,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    is_transposed: bool,
    tiles: Tensor,
    slots: Tensor,
    *,
    is_sorted: bool = False,
) -> Launch:
    """Sorted rows (S, D) times their experts' matrices, not yet weighted, to slots (S, N) in pair order or sorted."""
    config, depth, width = choice.down, rows.shape[1], slots.shape[1]
    constants = {
        **{"HIDDEN": width, "INNER": depth, "TRANSPOSED": is_transposed, **bias_strides(bias)},
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth, "GROUP": GROUP},
        "SORTED": is_sorted,
    }
    matrix = descriptors.matrix_descriptor(weight, is_transposed, config.columns, config.depth)
    described = [descriptors.rows_descriptor(rows, height, config.depth) for height in (config.rows, config.rows // 2)]
    arguments = (*described, tiles, matrix, bias, slots, sizes.pairs, num_tiles(sizes, config))
    grid = tile_grid(sizes, config, triton.cdiv(width, config.columns))
    return Launch(large.down_large, grid, arguments, constants, config.warps, config.stages)
