"""The launches of one call: which kernels, over what memory, with which constants.

Letters as in kernels/experts.py. Everything here follows from shapes, strides and dtypes, so the launches of a call
can be kept for the next one; see backends/fused.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from routed_experts.kernels import configs
from routed_experts.kernels import experts as kernels
from routed_experts.kernels.configs import Config, smaller_ones
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import tile_sizes
from routed_experts.kernels.weigh import weigh as weigh_kernel
from routed_experts.weights import ExpertWeights

# Row tiles that go through the column blocks together; see kernels/rows.py.
GROUP = 8


class Sizes(NamedTuple):
    """T, K, E, H and I of one call."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        """S = T*K."""
        return self.tokens * self.slots


class Choice(NamedTuple):
    """How a call is run: sorted or by pair, the tiles of both products, the precision of float32.

    ``split`` is into how many parts the second product's depth is cut where there are few programs.
    """

    is_sorted: bool
    up: Config
    down: Config
    precision: str
    split: int = 1


def sizes_of(experts: ExpertWeights, ids: Tensor) -> Sizes:
    """Return the sizes of a call with these ids, (T, K)."""
    return Sizes(*ids.shape, experts.num_experts, experts.hidden_size, experts.intermediate_size)


def choose(
    sizes: Sizes,
    has_gate: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    shared_limit: int,
    *,
    is_sorted: bool = False,
) -> Choice:
    """Choose regime and tiles.

    Args:
        sizes: of the call.
        has_gate: whether the first product has two columns for each of its results.
        dtype: of the products.
        capability: compute capability of the device.
        shared_limit: bytes of shared memory that a block may have there.
        is_sorted: sort however few the pairs are.
    """
    is_sorted = is_sorted or sizes.pairs > configs.MOST_PAIRS_UNSORTED
    if is_sorted:
        up, down = configs.sorted_configs(capability, sizes.pairs, sizes.experts)
    else:
        up, down = configs.unsorted_configs(capability, sizes.tokens)
    up = configs.fit(up, 1 + has_gate, dtype.itemsize, shared_limit)
    down = configs.fit(down, 1, dtype.itemsize, shared_limit)
    split = 1 if is_sorted else configs.split_of(down, sizes.pairs, sizes.inner, sizes.hidden)
    return Choice(is_sorted, up, down, float32_precision(dtype), split)


def smaller_choices(choice: Choice) -> Iterator[Choice]:
    """The choice and ever smaller tiles, should a device have less room than the table assumes."""
    ups, downs = list(smaller_ones(choice.up)), list(smaller_ones(choice.down))
    for step in range(max(len(ups), len(downs))):
        yield choice._replace(up=ups[min(step, len(ups) - 1)], down=downs[min(step, len(downs) - 1)])


def float32_precision(dtype: torch.dtype) -> str:
    """``ieee``, or ``tf32`` where the products are float32 and torch's own switch allows it."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def up(
    experts: ExpertWeights,
    choice: Choice,
    x: Tensor,
    ids: Tensor,
    rows: Tensor,
    out: Tensor,
    *,
    is_raw: bool = False,
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
    """
    sizes, weight, bias, config = sizes_of(experts, ids), experts.up_weight, experts.up_bias, choice.up
    constants = {
        **_blocks(config, sizes.hidden, out.shape[1], choice.precision),
        **_weight_strides(weight, bias, experts.is_transposed),
        **_gate(experts, is_raw),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": out.shape[1], "X_T": x.stride(0), "X_H": x.stride(1)},
    }
    columns = triton.cdiv(out.shape[1], config.columns)
    if choice.is_sorted:
        arguments: tuple[Any, ...] = (x, rows, weight, bias, out, sizes.pairs, num_tiles(sizes, config))
        constants["GROUP"] = GROUP
        return _launch(kernels.up_by_tile, _tile_grid(sizes, config, columns), arguments, constants, config)
    constants.update(_id_constants(sizes, ids), BLOCK_S=_pair_block(sizes), COUNTERS=rows.numel())
    arguments = (x, ids, weight, bias, out, rows, sizes.pairs)
    return _launch(kernels.up_by_pair, (sizes.pairs, columns, 1), arguments, constants, config)


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
    sizes, weight, bias, config = sizes_of(experts, ids), experts.down_weight, experts.down_proj_bias, choice.down
    constants = {
        **_blocks(config, sizes.inner, sizes.hidden, choice.precision),
        **_weight_strides(weight, bias, experts.is_transposed),
        **_id_constants(sizes, ids),
        **{"K": sizes.slots, "HIDDEN": sizes.hidden, "INNER": sizes.inner},
        **{"WEIGHTS_T": weights.stride(0), "WEIGHTS_K": weights.stride(1)},
        **{
            "BLOCK_S": _pair_block(sizes),
            "BLOCK_T": min(16, triton.next_power_of_2(sizes.tokens)),
            "SPLIT": choice.split,
        },
    }
    grid = (sizes.pairs, triton.cdiv(sizes.hidden, config.columns), choice.split)
    arguments = (a, ids, weights, weight, bias, slots, counters, out, sizes.pairs)
    return _launch(kernels.down_by_pair, grid, arguments, constants, config)


def down_by_tile(
    experts: ExpertWeights, choice: Choice, a: Tensor, ids: Tensor, tiles: Tensor, slots: Tensor
) -> Launch:
    """Second product over sorted tiles; a is (S, I), sorted; slots (S, H), in pair order."""
    sizes, weight, bias, config = sizes_of(experts, ids), experts.down_weight, experts.down_proj_bias, choice.down
    constants = {
        **_blocks(config, sizes.inner, sizes.hidden, choice.precision),
        **_weight_strides(weight, bias, experts.is_transposed),
        **{"HIDDEN": sizes.hidden, "INNER": sizes.inner, "GROUP": GROUP},
    }
    grid = _tile_grid(sizes, config, triton.cdiv(sizes.hidden, config.columns))
    arguments = (a, tiles, weight, bias, slots, sizes.pairs, num_tiles(sizes, config))
    return _launch(kernels.down_by_tile, grid, arguments, constants, config)


def weigh(slots: Tensor, ids: Tensor, weights: Tensor, out: Tensor, num_experts: int) -> Launch:
    """Weighted sum over slots: (S, H) in pair order to (T, H)."""
    tokens, hidden = out.shape
    rows, columns = 2, min(512, triton.next_power_of_2(hidden))
    constants = {
        **{"E": num_experts, "K": ids.shape[1], "HIDDEN": hidden, "IDS_T": ids.stride(0), "IDS_K": ids.stride(1)},
        **{"WEIGHTS_T": weights.stride(0), "WEIGHTS_K": weights.stride(1), "BLOCK_T": rows, "BLOCK_N": columns},
    }
    grid = (triton.cdiv(tokens, rows), triton.cdiv(hidden, columns), 1)
    return Launch(weigh_kernel, grid, (slots, ids, weights, out, tokens), constants)


def _tile_grid(sizes: Sizes, config: Config, columns: int) -> tuple[int, int, int]:
    return (triton.cdiv(num_tiles(sizes, config), GROUP) * GROUP * columns, 1, 1)


def num_tiles(sizes: Sizes, config: Config) -> int:
    """Tiles of the sorted rows, used or not."""
    return tile_sizes(sizes.pairs, sizes.experts, config.rows)[1]


def counters_of(choice: Choice, hidden: int) -> int:
    """How many counters :func:`down_by_pair` needs: a power of two at or above its column blocks."""
    return int(triton.next_power_of_2(triton.cdiv(hidden, choice.down.columns)))


def _launch(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any], config: Config
) -> Launch:
    return Launch(kernel, grid, arguments, constants, config.warps, config.stages)


def _blocks(config: Config, depth: int, columns: int, precision: str) -> dict[str, Any]:
    even = depth % config.depth == 0 and columns % config.columns == 0
    blocks = {"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_D": config.depth}
    return {**blocks, "EVEN": even, "SWAP": config.swap, "PRECISION": precision}


def _weight_strides(weight: Tensor, bias: Tensor | None, is_transposed: bool) -> dict[str, int]:
    """Strides of an expert, of a column of the product, along the summed dimension; and those of the bias."""
    expert, column, depth = weight.mT.stride() if is_transposed else weight.stride()
    bias_strides = (0, 0) if bias is None else bias.stride()
    return {"W_E": expert, "W_N": column, "W_D": depth, "BIAS_E": bias_strides[0], "BIAS_N": bias_strides[1]}


def _gate(experts: ExpertWeights, is_raw: bool) -> dict[str, Any]:
    if is_raw:
        return {"GATE": "raw", "ACTIVATION": "identity", "LIMIT": None, "ALPHA": None}
    constants = {"ACTIVATION": experts.activation_name, "LIMIT": None, "ALPHA": None}
    if not experts.has_gate:
        return {**constants, "GATE": "none"}
    kind = "halves" if experts.is_concatenated else "pairs"
    return {**constants, "GATE": kind, "LIMIT": experts.swiglu_limit, "ALPHA": experts.swiglu_alpha}


def _id_constants(sizes: Sizes, ids: Tensor) -> dict[str, int]:
    return {"E": sizes.experts, "IDS_T": ids.stride(0), "IDS_K": ids.stride(1)}


def _pair_block(sizes: Sizes) -> int:
    return max(2, int(triton.next_power_of_2(sizes.pairs)))
