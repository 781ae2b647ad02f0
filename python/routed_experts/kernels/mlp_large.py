"""The launches of the products of a large call, whose operands come through tensor descriptors."""

from __future__ import annotations

import triton
from torch import Tensor

from routed_experts.kernels import descriptors, large
from routed_experts.kernels.choice import Choice, num_tiles, sizes_of
from routed_experts.kernels.constants import GROUP, bias_strides, gate_constants, tile_grid
from routed_experts.kernels.launch import Launch
from routed_experts.weights import ExpertWeights


def up(
    experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, tiles: Tensor, out: Tensor, *, is_raw: bool
) -> Launch:
    """First product and its gate: x (T, H) to out (S, I), or (S, N) when raw, sorted."""
    sizes, config, bias, gate = sizes_of(experts, ids), choice.up, experts.up_bias, gate_constants(experts, is_raw)
    constants = {
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": out.shape[1], "X_T": x.stride(0), "X_H": x.stride(1)},
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth, "GROUP": GROUP},
        **{**bias_strides(bias), **gate, "TRANSPOSED": experts.is_transposed},
    }
    weight = descriptors.up_descriptor(experts, gate["GATE"], config.columns, config.depth)
    arguments = (x, tiles, weight, bias, out, sizes.pairs, num_tiles(sizes, config))
    grid = tile_grid(sizes, config, triton.cdiv(out.shape[1], config.columns))
    return Launch(large.up_large, grid, arguments, constants, config.warps, config.stages)


def down(experts: ExpertWeights, choice: Choice, a: Tensor, ids: Tensor, tiles: Tensor, slots: Tensor) -> Launch:
    """Second product, not yet weighted: a (S, I), sorted, to slots (S, H) in pair order."""
    sizes, config, bias = sizes_of(experts, ids), choice.down, experts.down_proj_bias
    constants = {
        **{"HIDDEN": sizes.hidden, "INNER": sizes.inner, "TRANSPOSED": experts.is_transposed, **bias_strides(bias)},
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth, "GROUP": GROUP},
    }
    weight = descriptors.down_descriptor(experts, config.columns, config.depth)
    rows = descriptors.rows_descriptor(a, config.rows, config.depth)
    arguments = (rows, tiles, weight, bias, slots, sizes.pairs, num_tiles(sizes, config))
    grid = tile_grid(sizes, config, triton.cdiv(sizes.hidden, config.columns))
    return Launch(large.down_large, grid, arguments, constants, config.warps, config.stages)
