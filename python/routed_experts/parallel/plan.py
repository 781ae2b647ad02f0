"""Which rows go to which rank, and the way back: counted before anything is sent, planned once all ranks agree.

T tokens, K slots a token, E experts of all ranks, W ranks, C runs of tokens, M = min(K, W), R rows. On a CPU both are
Rust; elsewhere torch operations give the same numbers, and only :class:`Counts` has to be read by the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts import _core
from routed_experts.layout import ID_CODES
from routed_experts.parallel.plan_device import count_rows_torch, plan_torch


class Counts(NamedTuple):
    """What a rank will send: on the device of the ids, so that it can be exchanged before anybody reads it."""

    rows_CW: Tensor  # int64: rows of each run of tokens for each rank
    widest: Tensor  # () int64: most slots of one row


class DispatchPlan(NamedTuple):
    """The rows of a run of tokens, sorted by rank, then by token. Every tensor is int32.

    A token travels once to each rank that owns any of its experts, with the slots that it has there.

    Attributes:
        rows: (W,) rows for each rank.
        source: (T*M,) row -> token, -1 behind the last row.
        pairs: (T*M, K) row and place -> pair, of a row's pairs first, in slot order; -1 after them.
        place: (T, K) pair -> row*K + place, -1 for a pair that goes nowhere.
        homes: (T, M) token -> its rows, in the order of the ranks, -1 after them.
    """

    rows: Tensor
    source: Tensor
    pairs: Tensor
    place: Tensor
    homes: Tensor


def count_rows(top_k_index: Tensor, num_experts: int, ranks: int, chunks: int) -> Counts:
    """Count the rows of each of C runs of tokens, the c-th being tokens c*T//C .. (c+1)*T//C - 1.

    Raises:
        LayoutError: experts that the ranks cannot share equally, or too many slots to number in int32.
    """
    if not _is_plain_cpu(top_k_index):
        return Counts(*count_rows_torch(top_k_index, num_experts, ranks, chunks))
    ids = top_k_index.contiguous()
    tokens, slots = ids.shape
    rows = torch.empty(chunks, ranks, dtype=torch.int64)
    code = ID_CODES[ids.dtype]
    widest = _core.dispatch_count(ids.data_ptr(), code, tokens, slots, num_experts, ranks, chunks, rows.data_ptr())
    return Counts(rows, torch.tensor(widest))


def plan_dispatch(top_k_index: Tensor, num_experts: int, ranks: int) -> DispatchPlan:
    """Plan the rows of (T, K) ids over all E experts; an id outside 0..E-1 goes nowhere. Nothing waits for the device.

    Raises as :func:`count_rows` does.
    """
    if not _is_plain_cpu(top_k_index):
        return DispatchPlan(*plan_torch(top_k_index, num_experts, ranks))
    ids = top_k_index.contiguous()
    tokens, slots = ids.shape
    width = min(slots, ranks)
    sizes = [ranks, tokens * width, tokens * width * slots, tokens * slots, tokens * width]
    buffer = torch.empty(sum(sizes), dtype=torch.int32)
    code = ID_CODES[ids.dtype]
    out = (buffer.data_ptr(), buffer.numel())
    _core.dispatch_plan(ids.data_ptr(), code, tokens, slots, num_experts, ranks, *out)
    rows, source, pairs, place, homes = torch.split_with_sizes(buffer, sizes)
    return DispatchPlan(
        rows,
        source,
        pairs.view(-1, slots) if slots else pairs.view(0, 0),
        place.view(tokens, slots),
        homes.view(tokens, width),
    )


def _is_plain_cpu(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu
