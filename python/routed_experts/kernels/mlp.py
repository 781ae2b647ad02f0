"""The launches of one call: which kernels, over what memory, with which constants.

Letters as in kernels/experts.py. Everything here follows from shapes, strides and dtypes, so the launches of a call
can be kept for the next one; see kernels/fused.py.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from routed_experts.kernels import experts as kernels
from routed_experts.kernels import mlp_large, quantized_configs
from routed_experts.kernels.choice import Choice, Sizes, num_tiles, sizes_of
from routed_experts.kernels.configs import Config
from routed_experts.kernels.constants import (
    GROUP,
    block_constants,
    gate_constants,
    id_constants,
    pair_block,
    routing_strides,
    row_stride,
    tile_grid,
)
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.matrices import Matrix, down_matrix, up_matrix
from routed_experts.kernels.weigh import weigh as weigh_kernel
from routed_experts.weights import ExpertWeights


def up(
    experts: ExpertWeights,
    choice: Choice,
    x: Tensor,
    ids: Tensor,
    rows: Tensor,
    out: Tensor,
    *,
    is_raw: bool = False,
    raw: Tensor | None = None,
) -> Launch:
    """First product and its gate; rows of the result are in pair order, or sorted where the choice is.

    Args:
        experts: the weights.
        choice: see :func:`choose`.
        x: (T, H) tokens.
        ids: (T, K) expert ids.
        rows: the flat tiles of sorted rows; or the counters of :func:`down_by_pair`, which this clears.
        out: (S, I); or (S, N) when raw, a first product without its gate.
        is_raw: leave the gate out.
        raw: of sorted rows, (S, N) for the first product beside its gated units; None to forget it.
    """
    if choice.is_large:
        return mlp_large.up(experts, choice, x, ids, rows, out, is_raw=is_raw, raw=raw)
    sizes, matrix, config = sizes_of(experts, ids), up_matrix(experts, reads_e4m3=choice.reads_e4m3), choice.up
    constants = {
        **block_constants(config, sizes.hidden, out.shape[1], choice.precision),
        **matrix.constants(),
        "NARROW": choice.is_narrow,
        **gate_constants(experts, is_raw),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": out.shape[1], "X_T": row_stride(x), "X_H": 1},
    }
    columns = triton.cdiv(out.shape[1], config.columns)
    if choice.is_sorted:
        arguments: tuple[Any, ...] = (x, rows, *matrix[:3], out, raw, sizes.pairs, num_tiles(sizes, config))
        constants["GROUP"] = GROUP
        return _launch(kernels.up_by_tile, tile_grid(sizes, config, columns), arguments, constants, config, choice)
    constants.update(id_constants(sizes, ids), BLOCK_S=pair_block(sizes), COUNTERS=rows.numel())
    arguments = (x, ids, *matrix[:3], out, rows, sizes.pairs)
    return _launch(kernels.up_by_pair, (sizes.pairs, columns, 1), arguments, constants, config, choice)


def down_by_pair(
    experts: ExpertWeights,
    choice: Choice,
    a: Tensor,
    ids: Tensor,
    weights: Tensor,
    counters: Tensor,
    slots: Tensor,
    out: Tensor,
) -> Launch:
    """Second product and weighted sum without a sort; a is (S, I), out (T, H).

    ``slots`` is scratch: (split * S, H) in float32, the rows of each part of I.
    """
    sizes, matrix, config = sizes_of(experts, ids), down_matrix(experts, reads_e4m3=choice.reads_e4m3), choice.down
    constants = {
        **block_constants(config, sizes.inner, sizes.hidden, choice.precision),
        **matrix.constants(),
        "NARROW": choice.is_narrow,
        **id_constants(sizes, ids),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": sizes.inner},
        **routing_strides(weights),
        **{
            "BLOCK_S": pair_block(sizes),
            "BLOCK_T": min(16, triton.next_power_of_2(sizes.tokens)),
            "SPLIT": choice.split,
        },
    }
    grid = (sizes.pairs, triton.cdiv(sizes.hidden, config.columns), choice.split)
    arguments = (a, ids, weights, *matrix[:3], slots, counters, out, sizes.pairs)
    return _launch(kernels.down_by_pair, grid, arguments, constants, config, choice)


def down_by_tile(
    experts: ExpertWeights, choice: Choice, a: Tensor, ids: Tensor, tiles: Tensor, slots: Tensor
) -> Launch:
    """Second product over sorted tiles; a is (S, I), sorted; slots (S, H), in pair order."""
    matrix = down_matrix(experts, reads_e4m3=choice.reads_e4m3)
    return rows_by_tile(sizes_of(experts, ids), choice, a, matrix, tiles, slots)


def rows_by_tile(sizes: Sizes, choice: Choice, rows: Tensor, matrix: Matrix, tiles: Tensor, slots: Tensor) -> Launch:
    """Sorted rows (S, D) times their experts' matrices to (S, N) in pair order."""
    if choice.is_large:
        return mlp_large.rows_by_tile(
            sizes, choice, rows, matrix.weight, matrix.bias, matrix.is_transposed, tiles, slots
        )
    config, depth, width = choice.down, sizes.inner if choice.has_records else rows.shape[1], slots.shape[1]
    constants = {
        **block_constants(config, depth, width, choice.precision),
        **matrix.constants(),
        "NARROW": choice.is_narrow,
        **{"HIDDEN": width, "INNER": depth, "GROUP": GROUP},
    }
    grid = tile_grid(sizes, config, triton.cdiv(width, config.columns))
    arguments = (rows, tiles, *matrix[:3], slots, sizes.pairs, num_tiles(sizes, config))
    return _launch(kernels.down_by_tile, grid, arguments, constants, config, choice)


def weigh(slots: Tensor, ids: Tensor, weights: Tensor | None, out: Tensor, num_experts: int) -> Launch:
    """Weighted sum over slots: (S, H) in pair order to (T, H); without weights each counts once."""
    tokens, hidden = out.shape
    rows, columns = 2, min(512, triton.next_power_of_2(hidden))
    constants = {
        **{"E": num_experts, "K": ids.shape[1], "HIDDEN": hidden, "IDS_T": row_stride(ids), "IDS_K": 1},
        **{**routing_strides(weights), "BLOCK_T": rows, "BLOCK_N": columns},
    }
    grid = (triton.cdiv(tokens, rows), triton.cdiv(hidden, columns), 1)
    return Launch(weigh_kernel, grid, (slots, ids, weights, out, tokens), constants)


def counters_of(choice: Choice, hidden: int) -> int:
    """How many counters :func:`down_by_pair` needs: a power of two at or above its column blocks."""
    return int(triton.next_power_of_2(triton.cdiv(hidden, choice.down.columns)))


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    config: Config,
    choice: Choice,
) -> Launch:
    registers = quantized_configs.registers(config) if choice.has_records else None
    return Launch(kernel, grid, arguments, constants, config.warps, config.stages, registers)
