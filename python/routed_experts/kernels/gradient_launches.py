"""The launches of a backward: which kernels, over what memory, with which constants.

Letters as in kernels/experts.py; the kernels are in kernels/gradients.py, sums.py and weigh.py.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from routed_experts.kernels import descriptors, gradients, sums, sums_large
from routed_experts.kernels import experts as kernels
from routed_experts.kernels.choice import Choice, Sizes, num_tiles
from routed_experts.kernels.configs import Config
from routed_experts.kernels.constants import (
    GROUP,
    bias_strides,
    block_constants,
    gate_constants,
    id_constants,
    routing_strides,
    row_stride,
    tile_grid,
)
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.matrices import Matrix
from routed_experts.kernels.weigh import weigh_gradient as weigh_gradient_kernel
from routed_experts.weights import ExpertWeights

# Experts a program of the list looks for, and tiles it looks at together.
_OWN, _WIDTH = 16, 128


class Rows(NamedTuple):
    """An operand of a sum over an expert's rows.

    ``per`` is 0 for rows (S, D) in sorted order, else how many pairs share a row: K for tokens (T, D), 1 for rows
    in pair order.
    """

    tensor: Tensor
    per: int


def units(
    experts: ExpertWeights,
    choice: Choice,
    sizes: Sizes,
    grad: Tensor,
    tiles: Tensor,
    u: Tensor,
    weights: Tensor,
    made: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Launch:
    """grad (T, H), contiguous, and u (S, N) to the gradient of u, w * a and parts of w's gradient; see gradients.py."""
    config, weight, transposed = choice.up, experts.down_weight, not experts.is_transposed
    expert, column, depth = (weight.mT if transposed else weight).stride()
    constants = {
        **block_constants(config, sizes.hidden, sizes.inner, choice.precision),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": sizes.inner, "GROUP": GROUP},
        **{**routing_strides(weights), **gate_constants(experts, False)},
        **{"W_E": expert, "W_N": column, "W_D": depth},
    }
    grid = tile_grid(sizes, config, triton.cdiv(sizes.inner, config.columns))
    arguments = (grad, tiles, weight, u, weights, *made, sizes.pairs, num_tiles(sizes, config))
    return Launch(gradients.units_gradient, grid, arguments, constants, config.warps, config.stages)


def through_gate(
    experts: ExpertWeights,
    sizes: Sizes,
    back: Tensor,
    tiles: Tensor,
    ids: Tensor,
    u: Tensor,
    weights: Tensor,
    made: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Launch:
    """The same from back (S, I), sorted: grad at every row times its expert's second matrix."""
    constants = {
        **{**id_constants(sizes, ids), "K": sizes.slots, "INNER": sizes.inner},
        **{**routing_strides(weights), **gate_constants(experts, False)},
        **{"BLOCK_M": 1, "BLOCK_N": _no_wider(1024, sizes.inner)},
    }
    arguments = (back, tiles, ids, u, weights, *made, sizes.pairs)
    return Launch(gradients.rows_through_gate, (sizes.pairs, 1, 1), arguments, constants)


def gather(sizes: Sizes, rows: Rows, tiles: Tensor, ids: Tensor, out: Tensor) -> Launch:
    """Rows that pairs share to out (S, D), sorted."""
    width = out.shape[1]
    constants = {
        **{**id_constants(sizes, ids), "K": sizes.slots, "PER": rows.per, "WIDTH": width},
        **{"ROW": row_stride(rows.tensor), "BLOCK_M": 1, "BLOCK_N": _no_wider(1024, width)},
    }
    arguments = (rows.tensor, tiles, ids, out, sizes.pairs)
    return Launch(sums_large.gather_rows, (sizes.pairs, 1, 1), arguments, constants)


def unit_parts(choice: Choice, sizes: Sizes) -> int:
    """How many parts of the routing weights' gradient there are for every pair: of :func:`units` two a column block."""
    return 1 if choice.is_large else 2 * int(triton.cdiv(sizes.inner, choice.up.columns))


def gathered(choice: Choice, sizes: Sizes, rows: Rows, matrix: Matrix, tiles: Tensor, out: Tensor) -> Launch:
    """Rows of tokens or pairs times matrices to out (S, N), sorted."""
    config, depth, width = choice.up, rows.tensor.shape[1], out.shape[1]
    constants = {
        **block_constants(config, depth, width, choice.precision),
        **matrix.constants(),
        "NARROW": False,
        **{"K": rows.per, "HIDDEN": depth, "INNER": width, "GROUP": GROUP},
        **{"X_T": row_stride(rows.tensor), "X_H": 1},
        **{"GATE": "raw", "ACTIVATION": "identity", "LIMIT": None, "ALPHA": None},
    }
    grid = tile_grid(sizes, config, triton.cdiv(width, config.columns))
    arguments = (rows.tensor, tiles, *matrix[:3], out, None, sizes.pairs, num_tiles(sizes, config))
    return Launch(kernels.up_by_tile, grid, arguments, constants, config.warps, config.stages)


def ranges(choice: Choice, sizes: Sizes, tiles: Tensor, out: Tensor) -> Launch:
    """First sorted row and number of rows of every expert, int32 (E, 2), from the flat tiles."""
    constants = {"E": sizes.experts, "BLOCK_E": _OWN, "WIDTH": _WIDTH}
    arguments = (tiles, out, sizes.pairs, num_tiles(sizes, choice.up))
    return Launch(sums.expert_ranges, (triton.cdiv(sizes.experts, _OWN), 1, 1), arguments, constants)


def weight(
    config: Config, precision: str, left: Rows, right: Rows, tiles: Tensor, ranges: Tensor, out: Tensor, *, add: bool
) -> Launch:
    """Sum of left^T right over the rows of every expert to out (E, M, N), of any strides; ``add`` to what is there."""
    experts, height, width = out.shape
    rows, columns = _no_wider(config.rows, height), _no_wider(config.columns, width)
    constants = {
        **{"M": height, "N": width, "LEFT_PER": left.per, "RIGHT_PER": right.per, "GROUP": GROUP},
        **{"LEFT_ROW": left.tensor.stride(0), "LEFT_COLUMN": left.tensor.stride(1)},
        **{"RIGHT_ROW": right.tensor.stride(0), "RIGHT_COLUMN": right.tensor.stride(1)},
        **{"OUT_E": out.stride(0), "OUT_M": out.stride(1), "OUT_N": out.stride(2)},
        **{"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_D": config.depth},
        **{"ACCUMULATE": add, "PRECISION": precision},
    }
    grid = (experts * triton.cdiv(height, rows) * triton.cdiv(width, columns), 1, 1)
    arguments = (left.tensor, right.tensor, tiles, ranges, out)
    return Launch(sums.weight_gradient, grid, arguments, constants, config.warps, config.stages)


def weight_large(config: Config, left: Tensor, right: Tensor, ranges: Tensor, out: Tensor, *, add: bool) -> Launch:
    """The same of sorted rows, left (S, M) and right (S, N), that descriptors can stand for."""
    experts, height, width = out.shape
    constants = {
        **{"M": height, "N": width, "GROUP": GROUP, "ACCUMULATE": add},
        **{"OUT_E": out.stride(0), "OUT_M": out.stride(1), "OUT_N": out.stride(2)},
        **{"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth},
    }
    described = (
        descriptors.rows_descriptor(left, config.depth, config.rows),
        descriptors.rows_descriptor(right, config.depth, config.columns),
    )
    grid = (experts * triton.cdiv(height, config.rows) * triton.cdiv(width, config.columns), 1, 1)
    arguments = (*described, left, right, ranges, out)
    return Launch(sums_large.weight_gradient_large, grid, arguments, constants, config.warps, config.stages)


def bias(sizes: Sizes, rows: Rows, weights: Tensor | None, tiles: Tensor, ranges: Tensor, out: Tensor) -> Launch:
    """Sum over the rows of every expert, times their routing weights unless those are None, to out (E, N)."""
    experts, width = out.shape
    columns = _no_wider(128, width)
    constants = {
        **{"N": width, "K": sizes.slots, "PER": rows.per, **routing_strides(weights)},
        **{"ROW": rows.tensor.stride(0), "COLUMN": rows.tensor.stride(1)},
        **{"OUT_E": out.stride(0), "OUT_N": out.stride(1), "BLOCK_D": 32, "BLOCK_N": columns},
    }
    arguments = (rows.tensor, tiles, ranges, weights, out)
    return Launch(sums.bias_gradient, (experts, triton.cdiv(width, columns), 1), arguments, constants)


def routing(experts: ExpertWeights, sizes: Sizes, partial: Tensor, ids: Tensor, grad: Tensor, out: Tensor) -> Launch:
    """Parts (parts, S) and grad (T, H) to the gradient of the routing weights, out (T, K)."""
    bias = experts.down_proj_bias
    rows = 16 if bias is not None else 256
    constants = {
        **{**id_constants(sizes, ids), **bias_strides(bias), "K": sizes.slots, "HIDDEN": sizes.hidden},
        **{"PARTS": partial.shape[0], "BLOCK_S": rows, "BLOCK_N": _no_wider(256, sizes.hidden)},
    }
    grid = (triton.cdiv(sizes.pairs, rows), 1, 1)
    return Launch(sums.routing_gradient, grid, (partial, ids, grad, bias, out, sizes.pairs), constants)


def weigh(
    sizes: Sizes,
    grad: Tensor,
    slots: Tensor,
    ids: Tensor,
    weights: Tensor,
    made: tuple[Tensor | None, Tensor | None],
) -> Launch:
    """grad (T, H) of a weighted sum to the gradients of its slots (S, H) and of its weights (T, K)."""
    rows, columns = 8, _no_wider(256, sizes.hidden)
    constants = {
        **{**id_constants(sizes, ids), **routing_strides(weights), "K": sizes.slots, "HIDDEN": sizes.hidden},
        **{"BLOCK_S": rows, "BLOCK_N": columns},
    }
    grid = (triton.cdiv(sizes.pairs, rows), 1, 1)
    return Launch(weigh_gradient_kernel, grid, (grad, slots, ids, weights, *made, sizes.pairs), constants)


def _no_wider(block: int, width: int) -> int:
    """A block that a matrix of this width fills, and tensor cores can take."""
    return min(block, max(16, int(triton.next_power_of_2(width))))
