"""The dispatch plan in torch operations alone: the same numbers as the Rust plan, with no wait and no atomics."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def count_rows_torch(top_k_index: Tensor, num_experts: int, ranks: int, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the rows (C, W) of each run of tokens, and the most slots of one row."""
    hits_TW = _hits(_owners(top_k_index, num_experts, ranks), ranks)
    tokens = hits_TW.shape[0]
    ends = torch.nn.functional.pad((hits_TW > 0).cumsum(0), (0, 0, 1, 0))
    edges = [chunk * tokens // chunks for chunk in range(chunks + 1)]
    rows_CW = torch.stack([ends[end] - ends[first] for first, end in pairwise(edges)])
    widest = hits_TW.amax().to(torch.int64) if hits_TW.numel() else hits_TW.new_zeros((), dtype=torch.int64)
    return rows_CW, widest


def plan_torch(top_k_index: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, ...]:
    """Return rows, source, pairs, place and homes of a :class:`DispatchPlan`."""
    tokens, slots = top_k_index.shape
    width = min(slots, ranks)
    owner_TK = _owners(top_k_index, num_experts, ranks)
    goes_TW = _hits(owner_TK, ranks) > 0
    # Numbers in the order of ranks, then tokens: what lies there is the row.
    row_TW = (goes_TW.t().reshape(-1).cumsum(0) - 1).view(ranks, tokens).t()
    token_T = torch.arange(tokens, device=top_k_index.device)
    place_TK = _places(owner_TK, row_TW, slots)
    most = tokens * width
    source = _inverse(torch.where(goes_TW, row_TW, -1), token_T[:, None].expand(tokens, ranks), most)
    pair_TK = torch.arange(tokens * slots, device=top_k_index.device).view(tokens, slots)
    pairs = _inverse(place_TK, pair_TK, most * slots).view(most, slots)
    order = torch.where(goes_TW, row_TW, tokens * ranks).sort(dim=1).values[:, :width]
    homes = torch.where(order < tokens * ranks, order, -1)
    parts = (goes_TW.sum(0), source, pairs, place_TK, homes)
    return tuple(part.to(torch.int32) for part in parts)


def _owners(top_k_index: Tensor, num_experts: int, ranks: int) -> Tensor:
    """The rank of every pair, W for a pair that goes nowhere."""
    id_TK = top_k_index.to(torch.int64)
    share = num_experts // ranks
    nowhere = (id_TK < 0) | (id_TK >= num_experts)
    return torch.div(id_TK, share, rounding_mode="floor").masked_fill(nowhere, ranks)


def _hits(owner_TK: Tensor, ranks: int) -> Tensor:
    """How many slots of every token each rank has, (T, W). Slot by slot: a (T, K, W) mask would be K times as large."""
    rank_W = torch.arange(ranks, device=owner_TK.device)
    hits = torch.zeros(owner_TK.shape[0], ranks, dtype=torch.int32, device=owner_TK.device)
    for slot in range(owner_TK.shape[1]):
        hits += owner_TK[:, slot, None] == rank_W
    return hits


def _places(owner_TK: Tensor, row_TW: Tensor, slots: int) -> Tensor:
    """row*K + place of every pair, -1 for one that goes nowhere."""
    ranks = row_TW.shape[1]
    goes_TK = owner_TK < ranks
    used = torch.zeros_like(owner_TK)
    for slot in range(1, slots):
        used[:, slot] = (owner_TK[:, :slot] == owner_TK[:, slot, None]).sum(1)
    row_TK = row_TW.gather(1, owner_TK.clamp(max=ranks - 1))
    return torch.where(goes_TK, row_TK * slots + used, -1)


def _inverse(index: Tensor, value: Tensor, size: int) -> Tensor:
    """Return ``out`` of ``size`` with out[index] = value and -1 elsewhere; index -1 writes nowhere."""
    out = torch.full((size + 1,), -1, dtype=torch.int64, device=index.device)
    # No two entries share a place but those that land behind the end, which is cut off.
    out.scatter_(0, torch.where(index < 0, size, index).reshape(-1), value.reshape(-1))
    return out[:size]
