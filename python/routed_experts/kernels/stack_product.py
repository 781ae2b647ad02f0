"""Rows times quantized matrices alone, for backends whose gate and weighted sum are their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from routed_experts.kernels import configs, mlp, quantized_configs
from routed_experts.kernels import experts as kernels
from routed_experts.kernels.choice import Choice, Device, Sizes, float32_precision, smaller_choices
from routed_experts.kernels.constants import block_constants, id_constants, pair_block
from routed_experts.kernels.fused import limits, run_smaller
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches
from routed_experts.kernels.matrices import Matrix, matrix_of
from routed_experts.kernels.steps import tile_lists
from routed_experts.quantization.stacks import Stack


def sorted_rows(x: Tensor, stack: Stack, bias: Tensor | None, offsets: Tensor, transposed: bool, clean: bool) -> Tensor:
    """Rows (S, D) sorted by expert, whose ends are ``offsets`` (E,), to (S, N); waits for nothing."""
    row = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, row, right=True)
    return _product(x, stack, bias, expert, transposed, clean, is_sorted=True)


def rows(x: Tensor, stack: Stack, bias: Tensor | None, expert: Tensor, transposed: bool, clean: bool) -> Tensor:
    """Rows (S, D) in any order, whose experts are ``expert`` (S,), -1 for none, to (S, N)."""
    return _product(x, stack, bias, expert, transposed, clean, is_sorted=False)


def _product(
    x: Tensor, stack: Stack, bias: Tensor | None, expert: Tensor, transposed: bool, clean: bool, *, is_sorted: bool
) -> Tensor:
    device, x = limits(x.device), x.contiguous()
    matrix = matrix_of(stack, bias, transposed, reads_e4m3=device.capability >= (8, 9))
    width = stack.shape[2 if transposed else 1]
    out = x.new_zeros(x.shape[0], width) if clean else x.new_empty(x.shape[0], width)
    sizes = Sizes(x.shape[0], 1, stack.shape[0], x.shape[1], width)
    ids = expert[:, None].contiguous()
    if sizes.pairs == 0:
        return out
    choice = _choice(matrix, sizes, x.dtype, device)
    if not choice.is_sorted:
        counters = torch.empty(1, dtype=torch.int32, device=x.device)
        run_smaller(smaller_choices(choice), out, lambda one: [_by_pair(matrix, one, sizes, x, ids, counters, out)])
        return out

    def attempt(one: Choice) -> Iterable[Launch]:
        tiles, chunks = tile_lists(sizes, one.up.rows, x.device)
        yield from launches(ids, tiles, chunks, sizes.experts, one.up.rows, tiles=True)
        # The list begins with the order of the rows; sorted rows are in order.
        given = x if is_sorted else _gathered(x, tiles, ids, sizes)
        yield mlp.rows_by_tile(sizes, one, given, matrix, tiles, out)

    run_smaller(smaller_choices(choice), out, attempt)
    return out


def _gathered(x: Tensor, tiles: Tensor, ids: Tensor, sizes: Sizes) -> Tensor:
    """Rows in the order of the list; those of nobody, which it leaves out, come last."""
    real = ((ids >= 0) & (ids < sizes.experts)).sum()
    place = torch.arange(sizes.pairs, device=x.device)
    return x.index_select(0, torch.where(place < real, tiles[: sizes.pairs], 0))


def _choice(matrix: Matrix, sizes: Sizes, dtype: torch.dtype, device: Device) -> Choice:
    is_sorted = sizes.pairs > configs.MOST_PAIRS_UNSORTED
    is_fp4 = matrix.format != "e4m3"
    table = quantized_configs.table(device.capability, is_fp4=is_fp4, quantizes=False, records=False)
    mean = sizes.pairs / sizes.experts if is_sorted else 0.0
    config = quantized_configs.products(table, mean, sizes.tokens)[1]
    config = quantized_configs.fit(config, 1, dtype.itemsize, is_fp4, device.shared_bytes)
    return Choice(is_sorted, config, config, float32_precision(dtype), is_quantized=True)


def _by_pair(
    matrix: Matrix, choice: Choice, sizes: Sizes, x: Tensor, ids: Tensor, counters: Tensor, out: Tensor
) -> Launch:
    config = choice.up
    constants = {
        **block_constants(config, sizes.hidden, sizes.inner, choice.precision),
        **{**matrix.constants(), **id_constants(sizes, ids), "NARROW": False},
        **{"GATE": "raw", "ACTIVATION": "identity", "LIMIT": None, "ALPHA": None, "COUNTERS": 1},
        **{"K": 1, "HIDDEN": sizes.hidden, "INNER": sizes.inner, "X_T": x.shape[1], "X_H": 1},
        "BLOCK_S": pair_block(sizes),
    }
    arguments = (x, ids, *matrix[:3], out, counters, sizes.pairs)
    grid = (sizes.pairs, triton.cdiv(sizes.inner, config.columns), 1)
    return Launch(kernels.up_by_pair, grid, arguments, constants, config.warps, config.stages)
