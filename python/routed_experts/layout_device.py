"""The layout in torch ops alone: for devices without a kernel of ours, and for fake and meta tensors.

Every size is known from the shapes, so nothing waits for the device and a CUDA graph can capture it; nothing
adds atomically, so the bits equal those of the Rust layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layout_sizes(pairs: int, num_experts: int, alignment: int) -> list[int]:
    """Lengths of order, inverse, counts, offsets and, padded, of starts, row_expert and block_expert.

    R, the length of row_expert, is S + min(S, E) * (A - 1): at most that many rows are used whatever the ids,
    because an expert with rows pads them by less than A.
    """
    sizes = [pairs, pairs, num_experts, num_experts]
    if alignment > 1:
        # Symbolic sizes take sym_min: comparing them would make compiled code depend on whether S < E.
        smaller = min if isinstance(pairs, int) and isinstance(num_experts, int) else torch.sym_min
        rows = pairs + smaller(pairs, num_experts) * (alignment - 1)
        sizes += [num_experts + 1, rows, rows // alignment]
    return sizes


def _layout_torch(top_k_index: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    """Return the tensors whose lengths :func:`layout_sizes` gives, int32, on the device of the ids."""
    bucket_S = _buckets(top_k_index, num_experts)
    sorted_S, order_S = bucket_S.sort(stable=True)
    # A permutation: no two rows write one place, so the scatter is the same on every run.
    row_S = torch.arange(order_S.numel(), dtype=torch.int32, device=order_S.device)
    inverse_S = torch.empty_like(row_S).scatter_(0, order_S, row_S)
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=order_S.device)
    offsets_E = torch.searchsorted(sorted_S, expert_E, right=True, out_int32=True)
    counts_E = offsets_E - torch.searchsorted(sorted_S, expert_E, out_int32=True)
    parts = [order_S.to(torch.int32), inverse_S, counts_E, offsets_E]
    if alignment > 1:
        parts += _padded(counts_E, top_k_index.numel(), alignment)
    return parts


def _buckets(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Flat int32 ids with every sentinel, negative or too large, as ``num_experts``: sorted last."""
    # int64 first: unsigned dtypes have few ops, and a uint64 that wraps to a negative is a sentinel anyway.
    id_S = top_k_index.reshape(-1).to(torch.int64)
    return id_S.masked_fill((id_S < 0) | (id_S >= num_experts), num_experts).to(torch.int32)


def _padded(counts_E: Tensor, pairs: int, alignment: int) -> list[Tensor]:
    num_experts = counts_E.numel()
    *_, rows, blocks = layout_sizes(pairs, num_experts, alignment)
    used_E = torch.div(counts_E + (alignment - 1), alignment, rounding_mode="floor") * alignment
    starts = torch.nn.functional.pad(used_E.cumsum(0, dtype=torch.int32), (1, 0))
    row_R = torch.arange(rows, dtype=torch.int32, device=counts_E.device)
    # Rows behind the end find E; the last expert's rows end at or before them, so they get -1 all the same.
    expert_R = torch.searchsorted(starts[1:], row_R, right=True, out_int32=True).clamp_(max=num_experts - 1)
    end_R = (starts[:-1] + counts_E)[expert_R]
    row_expert_R = expert_R.masked_fill_(row_R >= end_R, -1)
    # A block in use begins with a row of its expert: padding only follows rows.
    block_expert = row_expert_R[: blocks * alignment : alignment].clone()
    return [starts, row_expert_R, block_expert]


def first_out_of_range_torch(top_k_index: Tensor, num_experts: int) -> int | None:
    """Flat position of the first id outside 0..E-1, or None; waits for the device."""
    bad = (_buckets(top_k_index, num_experts) == num_experts).nonzero()
    return int(bad[0, 0]) if bad.numel() else None
