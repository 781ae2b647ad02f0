"""How evenly a batch loads the ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from routed_experts.parallel.link import Link

logger = logging.getLogger("routed_experts.parallel")


@dataclass(frozen=True)
class LoadReport:
    """The load of one call over all ranks, in (token, slot) pairs.

    Attributes:
        tokens_per_expert: pairs of every expert, E of them.
        tokens_per_rank: their sums over each rank's experts.
        imbalance: the most loaded rank over the mean of all; 1.0 is even, and the slowest rank takes that much longer.
        idle_experts: experts without a pair.
    """

    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    imbalance: float
    idle_experts: int

    def __str__(self) -> str:
        ranks = ", ".join(f"rank {rank}: {tokens}" for rank, tokens in enumerate(self.tokens_per_rank))
        most = max(self.tokens_per_expert)
        return (
            f"imbalance {self.imbalance:.2f} ({ranks}); busiest expert "
            f"{self.tokens_per_expert.index(most)} with {most}, {self.idle_experts} idle"
        )


def load_of(counts: list[int], ranks: int) -> LoadReport:
    """Return the report of ``counts`` pairs an expert, shared by ``ranks``."""
    share = len(counts) // ranks
    by_rank = tuple(sum(counts[rank * share : (rank + 1) * share]) for rank in range(ranks))
    mean = sum(by_rank) / ranks
    return LoadReport(tuple(counts), by_rank, max(by_rank) / mean if mean else 1.0, counts.count(0))


def measure_load(link: Link, top_k_index: Tensor, num_experts: int, is_shared: bool) -> LoadReport:
    """Count the pairs of all ranks, or of this one where all hold the same (``is_shared``). Waits for the device."""
    ids = top_k_index.reshape(-1).long()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    ones = torch.ones_like(ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).index_add_(0, ids, ones)[:-1]
    if not is_shared:
        counts = link.sum(counts.contiguous())
    return load_of(counts.tolist(), link.world)
