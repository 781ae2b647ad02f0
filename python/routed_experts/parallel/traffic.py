"""A small model of what expert parallelism moves and holds: plain arithmetic over shapes, for planning a machine.

Routing is taken to be even and independent: a token's K experts lie on distinct places among E. Then a rank owns none
of them with probability C(E - E/W, K) / C(E, K), which gives the ranks that a token travels to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from routed_experts.errors import LayoutError
from routed_experts.sharding import local_experts

_ID_BYTES = 4  # int32, a local id
_WEIGHT_BYTES = 4  # float32


@dataclass(frozen=True)
class Traffic:
    """What one layer costs one rank. Bytes a token count those that leave a rank for another, there and back.

    Attributes:
        ranks_per_token: distinct ranks that a token's experts lie on, on average.
        all_to_all_bytes: sent by a rank for each token of its own, in the forward.
        pairs_bytes: the same, were every (token, expert) pair sent by itself.
        all_reduce_bytes: sent by a rank for each token of the shared batch, in the forward (a ring).
        weight_bytes: of one rank's experts.
        rows_per_expert: of one expert, for each token of a rank.
    """

    ranks_per_token: float
    all_to_all_bytes: float
    pairs_bytes: float
    all_reduce_bytes: float
    weight_bytes: float
    rows_per_expert: float


def traffic(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    ranks: int,
    *,
    element_bytes: int = 2,
    weight_bytes: float = 2.0,
    slots_sent: int | None = None,
) -> Traffic:
    """Return the model's figures for gated experts of E, K, H, I over W ranks.

    Args:
        element_bytes: of a hidden state.
        weight_bytes: of a stored weight with its scales: 2 for bfloat16, about 1.0 for FP8, 0.53 for MXFP4.
        slots_sent: slots that travel with a row; by default K, which a batch of any size soon has.

    Raises:
        LayoutError: experts that the ranks cannot share equally, or K outside 0..E.
    """
    share = len(local_experts(num_experts, 0, ranks))
    if not 0 <= top_k <= num_experts:
        raise LayoutError(
            "top_k does not fit the experts", found=f"K={top_k}", needed=f"0 to {num_experts}", hint="ids are distinct"
        )
    missed = math.comb(num_experts - share, top_k) / math.comb(num_experts, top_k)
    reached = ranks * (1 - missed)
    away = (ranks - 1) * (1 - missed)
    slots = min(top_k, share) if slots_sent is None else slots_sent
    there = hidden_size * element_bytes + slots * (_ID_BYTES + _WEIGHT_BYTES)
    back = hidden_size * element_bytes
    others = (ranks - 1) / ranks
    return Traffic(
        ranks_per_token=reached,
        all_to_all_bytes=away * (there + back),
        pairs_bytes=top_k * others * 2 * hidden_size * element_bytes,
        all_reduce_bytes=2 * others * hidden_size * max(element_bytes, 4),
        weight_bytes=3 * hidden_size * intermediate_size * share * weight_bytes,
        rows_per_expert=top_k * ranks / num_experts,
    )
