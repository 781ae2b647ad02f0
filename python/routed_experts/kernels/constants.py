"""Constants of the kernels that launches share: strides, block sizes, the gate."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from routed_experts.kernels import layout_kernels
from routed_experts.kernels.choice import Sizes, num_tiles
from routed_experts.kernels.configs import Config
from routed_experts.weights import ExpertWeights

GROUP = layout_kernels.GROUP.value


def tile_grid(sizes: Sizes, config: Config, columns: int) -> tuple[int, int, int]:
    """A program for every row tile and column block, whole groups of tiles."""
    return (triton.cdiv(num_tiles(sizes, config), GROUP) * GROUP * columns, 1, 1)


def block_constants(config: Config, depth: int, columns: int, precision: str) -> dict[str, Any]:
    """Tile of a product of this depth and so many columns, and whether it divides both."""
    even = depth % config.depth == 0 and columns % config.columns == 0
    blocks = {"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth}
    return {**blocks, "EVEN": even, "SWAP": config.swap, "PRECISION": precision}


def weight_strides(weight: Tensor, bias: Tensor | None, is_transposed: bool) -> dict[str, int]:
    """Strides of an expert, of a column of the product, along the summed dimension; and those of the bias."""
    expert, column, depth = weight.mT.stride() if is_transposed else weight.stride()
    return {"W_E": expert, "W_N": column, "W_D": depth, **bias_strides(bias)}


def bias_strides(bias: Tensor | None) -> dict[str, int]:
    """Strides of a bias, 0 without one."""
    expert, column = (0, 0) if bias is None else bias.stride()
    return {"BIAS_E": expert, "BIAS_N": column}


def settle(x: Tensor, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, ids and routing weights whose rows are contiguous, copied where they are not.

    Strides are constants of the kernels: those of a transposed tensor change with the number of tokens, and every
    number would be compiled for.
    """
    weights = None if weights is None else weights.contiguous()
    return x if x.stride(1) == 1 else x.contiguous(), ids.contiguous(), weights


def row_stride(rows: Tensor) -> int:
    """Stride from row to row; of a single row, whatever it was cut out of, the number of columns."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def routing_strides(weights: Tensor | None) -> dict[str, int]:
    """Strides of routing weights (T, K), 0 without any."""
    return {"WEIGHTS_T": 0 if weights is None else row_stride(weights), "WEIGHTS_K": 0 if weights is None else 1}


def gate_constants(experts: ExpertWeights, is_raw: bool) -> dict[str, Any]:
    """GATE and what belongs to it; see kernels/experts.py."""
    if is_raw:
        return {"GATE": "raw", "ACTIVATION": "identity", "LIMIT": None, "ALPHA": None}
    constants = {"ACTIVATION": experts.activation_name, "LIMIT": None, "ALPHA": None}
    if not experts.has_gate:
        return {**constants, "GATE": "none"}
    kind = "halves" if experts.is_concatenated else "pairs"
    return {**constants, "GATE": kind, "LIMIT": experts.swiglu_limit, "ALPHA": experts.swiglu_alpha}


def id_constants(sizes: Sizes, ids: Tensor) -> dict[str, int]:
    """How many experts there are, and where their ids stand."""
    return {"E": sizes.experts, "IDS_T": row_stride(ids), "IDS_K": 1}


def pair_block(sizes: Sizes) -> int:
    """Lanes that hold all pairs of an unsorted call."""
    return max(2, int(triton.next_power_of_2(sizes.pairs)))
