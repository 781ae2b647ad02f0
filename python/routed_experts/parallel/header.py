"""What ranks tell each other before any row is sent: one row of numbers of fixed length, whatever the call's shapes.

Every rank reads the same W headers and comes to the same verdict, so that all raise the same error, and nobody waits
for rows that never come. A rank whose own arguments do not fit says so in its header before it raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.errors import LayoutError
from routed_experts.parallel.errors import RankError
from routed_experts.parallel.link import Link

_MARK = 0x72782D6570_01  # of this protocol and its version
MOST_CHUNKS = 8  # a header has room for so many, used or not: ranks that differ in ``chunks`` must still understand it
DISPATCHES = ("all_reduce", "all_to_all", "megamoe")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Header(NamedTuple):
    """One rank's part of a call, as whole numbers."""

    mark: int = _MARK
    fault: int = 0  # 1: the rank refuses its own arguments
    call: int = 0  # how many calls came before
    dispatch: int = 0  # place in DISPATCHES
    experts: int = 0  # of all ranks
    hidden: int = 0
    slots: int = 0
    dtype: int = 0  # of hidden_states, place in _DTYPES
    weights_dtype: int = 0
    chunks: int = 0
    grad_mode: int = 0
    wants_grad: int = 0  # of hidden_states or routing weights
    trains: int = 0  # of this rank's experts
    tokens: int = 0
    digest: int = 0  # of the ids, where all ranks must hold the same
    widest: int = 0  # most slots of one row


_FIELDS = len(Header._fields)
_LENGTH = _FIELDS + MOST_CHUNKS

# Ranks must agree on these, and are told of the first one that differs.
_AGREED = {
    "call": "the number of calls made before",
    "dispatch": "dispatch",
    "experts": "the number of experts of all ranks",
    "hidden": "the hidden size",
    "slots": "K of top_k_index",
    "dtype": "the dtype of hidden_states",
    "weights_dtype": "the dtype of top_k_weights",
    "chunks": "chunks",
}
_SHARED = {"tokens": "T, for every rank holds the whole batch", "digest": "top_k_index (a digest of it)"}


def _dtype_of(code: int) -> object:
    return _DTYPES[code] if code < len(_DTYPES) else "a dtype that is none of these"


_READABLE: dict[str, Callable[[int], object]] = {
    "dispatch": lambda code: DISPATCHES[code],
    "dtype": _dtype_of,
    "weights_dtype": _dtype_of,
}


class Agreement(NamedTuple):
    """What all ranks now know of a call."""

    tokens: list[int]  # of every rank
    widest: int
    wants_grad: bool  # of hidden_states or routing weights, on any rank
    trains: bool  # of experts, on any rank
    send_CW: list[list[int]]
    receive_CW: list[list[int]]


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number that stands for a floating dtype in a header."""
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def digest_of(top_k_index: Tensor) -> int:
    """Return a number that differs, in all likelihood, for other ids."""
    ids = top_k_index.reshape(-1).long()
    return int((ids * (torch.arange(ids.numel(), device=ids.device) % 8191 + 1)).sum()) if ids.numel() else 0


def announce_fault(link: Link, device: torch.device) -> None:
    """Tell the others that this rank will not take part, because it is about to raise."""
    header = torch.zeros(link.world, _LENGTH, dtype=torch.int64)
    header[:, :_FIELDS] = torch.tensor(Header(fault=1))
    # Should nobody listen, the error that this rank is about to raise says more.
    with contextlib.suppress(RankError):
        link.exchange_headers(header.to(device))


def agree(link: Link, header: Header, rows_CW: Tensor, widest: Tensor) -> Agreement:
    """Exchange headers and counts, check them, and return what they say. Waits for the ranks and for the device, once.

    Raises:
        RankError: a rank that does not answer, or refuses its own arguments.
        LayoutError: ranks that do not make the same call. All ranks raise it alike, and may make the next call.
    """
    mine = rows_CW.new_zeros(link.world, _LENGTH)
    mine[:, :_FIELDS] = torch.tensor(header, dtype=torch.int64).to(mine.device, non_blocking=True)
    mine[:, _FIELDS - 1] = widest
    mine[:, _FIELDS : _FIELDS + rows_CW.shape[0]] = rows_CW.t()
    sent, received = torch.stack([mine, link.exchange_headers(mine)]).tolist()
    headers = [Header(*row[:_FIELDS]) for row in received]
    _check(headers, [row[_FIELDS:] for row in received])
    return Agreement(
        tokens=[one.tokens for one in headers],
        widest=max(1, *(one.widest for one in headers)),
        wants_grad=any(one.wants_grad for one in headers),
        trains=any(one.trains for one in headers),
        send_CW=_columns(sent)[: header.chunks],
        receive_CW=_columns(received)[: header.chunks],
    )


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*(row[_FIELDS:] for row in rows), strict=True)]


def _check(headers: Sequence[Header], counts_WC: Sequence[Sequence[int]]) -> None:
    strange = [rank for rank, one in enumerate(headers) if one.mark != _MARK]
    if strange:
        raise LayoutError(
            "a rank sent something else than the header of a call",
            found=f"from ranks {strange}",
            needed="the same version of routed-experts, in the same call, on every rank",
            hint="give the exchange a process group of its own",
        )
    refusing = [rank for rank, one in enumerate(headers) if one.fault]
    if refusing:
        raise RankError(
            "a rank refuses its own arguments",
            found=f"ranks {refusing}",
            needed="arguments that fit on every rank",
            hint="the error of that rank says what is wrong",
        )
    shared = _SHARED if DISPATCHES[headers[0].dispatch] == "all_reduce" else {}
    for name, text in (_AGREED | shared).items():
        _check_equal(text, [_READABLE.get(name, int)(getattr(one, name)) for one in headers])
    if any(one.wants_grad or one.trains for one in headers):
        _check_equal("whether gradients are recorded (torch.is_grad_enabled)", [bool(one.grad_mode) for one in headers])
    for rank, (one, counts) in enumerate(zip(headers, counts_WC, strict=True)):
        _check_counts(rank, one, counts)


def _check_equal(what: str, values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        raise LayoutError(
            f"the ranks differ in {what}",
            found=", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values)),
            needed="the same call on every rank",
            hint="every rank calls every layer in the same order; only the number of tokens may differ, and only with "
            'dispatch="all_to_all" or "megamoe"',
        )


def _check_counts(rank: int, header: Header, counts: Sequence[int]) -> None:
    """A rank sends no token twice, and none that it has not."""
    fits = all(count >= 0 for count in counts) and sum(counts) <= header.tokens and 0 <= header.widest <= header.slots
    if not fits:
        raise LayoutError(
            f"rank {rank} announces rows that it cannot have",
            found=f"{list(counts)} rows of {header.tokens} tokens, up to {header.widest} of {header.slots} slots each",
            needed="no more rows than tokens",
            hint="this is a mistake of the library or of the network: please report it",
        )
