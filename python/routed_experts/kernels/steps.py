"""The fused kernels one at a time, for experts whose gate or norm is code of their own.

Between the products rows are the sorted ones, behind the second in pair order. Rows of sentinels read 0, so that the
code between the steps never meets what nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from routed_experts.kernels import mlp
from routed_experts.kernels.choice import Choice, Sizes, choose, sizes_of, smaller_choices
from routed_experts.kernels.fused import limits, run_smaller
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches, scratch_size, tile_sizes
from routed_experts.weights import ExpertWeights


def up_rows(experts: ExpertWeights, x: Tensor, ids: Tensor) -> Tensor:
    """First product without its gate: x (T, H) and ids (T, K) to (S, N), sorted by expert."""
    out = x.new_zeros(ids.numel(), experts.intermediate_size * (1 + experts.has_gate))
    return _sorted(experts, x, ids, out, lambda choice, tiles: mlp.up(experts, choice, x, ids, tiles, out, is_raw=True))


def down_rows(experts: ExpertWeights, a: Tensor, ids: Tensor) -> Tensor:
    """Second product, not yet weighted: a (S, I), sorted, and ids (T, K) to (S, H) in pair order."""
    a = a.contiguous()
    out = a.new_zeros(ids.numel(), experts.hidden_size)
    return _sorted(experts, a, ids, out, lambda choice, tiles: mlp.down_by_tile(experts, choice, a, ids, tiles, out))


def weigh_rows(experts: ExpertWeights, slots: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over slots: (S, H), with ids and weights (T, K), to (T, H)."""
    slots = slots.contiguous()
    out = torch.empty(ids.shape[0], slots.shape[1], dtype=slots.dtype, device=slots.device)
    run_smaller([None], out, lambda _: [mlp.weigh(slots, ids, weights, out, experts.num_experts)])
    return out


def _sorted(
    experts: ExpertWeights, rows: Tensor, ids: Tensor, out: Tensor, product: Callable[[Choice, Tensor], Launch]
) -> Tensor:
    """Sort the pairs into tiles and launch one product over them."""
    sizes = sizes_of(experts, ids)
    choice = choose(experts, sizes, rows.dtype, limits(rows.device), is_sorted=True)

    def lists(attempt: Choice) -> Iterable[Launch]:
        tiles, chunks = tile_lists(sizes, attempt.up.rows, rows.device)
        yield from launches(ids, tiles, chunks, sizes.experts, attempt.up.rows, tiles=True)
        yield product(attempt, tiles)

    run_smaller(smaller_choices(choice), out, lists)
    return out


def tile_lists(sizes: Sizes, unit: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the flat list of tiles of ``unit`` rows, and the scratch that filling it takes."""
    length = sum(tile_sizes(sizes.pairs, sizes.experts, unit))
    scratch = scratch_size(sizes.pairs, sizes.experts)
    return (
        torch.empty(length, dtype=torch.int32, device=device),
        torch.empty(scratch, dtype=torch.int32, device=device),
    )
