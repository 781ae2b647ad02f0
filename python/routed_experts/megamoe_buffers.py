"""The symmetric buffers of Mega MoE: one for each group of ranks and shape, shared by all layers.

Making one is a collective. Ranks may have different numbers of tokens, and all must grow in the same call or wait for
each other forever; so they agree on the largest number at every call, unless ROUTED_EXPERTS_MEGAMOE_TOKENS has said
beforehand how many there may be.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from routed_experts.errors import LayoutError

MOST_TOKENS = "ROUTED_EXPERTS_MEGAMOE_TOKENS"
_UNIT = 384  # to which the kernel rounds up


class Sizes(NamedTuple):
    """What one buffer is for, beside its ranks."""

    hidden: int
    slots: int
    experts: int  # of all ranks
    inner: int


_BUFFERS: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def buffer_for(kernel: Any, group: Any, sizes: Sizes, tokens: int, device: torch.device) -> Any:
    """Return the buffer for a call of ``tokens`` tokens on this rank; every rank of the group must be here.

    Raises:
        LayoutError: more tokens than the variable allows, or a variable that is no number.
    """
    needed = _agreed(group, tokens, device)
    key = (id(group), *sizes)
    kept = _BUFFERS.get(key)
    if kept is not None and kept[1].num_max_tokens_per_rank >= needed:
        return kept[1]
    if kept is not None:
        _settle(group, device)
        _BUFFERS.pop(key)
        _free(kept[1])
    most = max(-(-needed // _UNIT), 1) * _UNIT
    buffer = kernel.symmetric_buffer(group, sizes.experts, most, sizes.slots, sizes.hidden, sizes.inner)
    # The group is held so that no other one gets its id.
    _BUFFERS[key] = (group, buffer)
    return buffer


def release_buffers(group: Any = None) -> None:
    """Free the buffers of a group, or of all: on every rank, and before the group is destroyed."""
    for key, (owner, buffer) in list(_BUFFERS.items()):
        if group is None or owner is group:
            del _BUFFERS[key]
            _free(buffer)


def _agreed(group: Any, tokens: int, device: torch.device) -> int:
    most = _most_tokens()
    if most is None:
        count = torch.tensor([tokens], dtype=torch.int64, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        return int(count.item())
    if tokens > most:
        raise LayoutError(
            "more tokens than the symmetric buffer was made for",
            found=f"{tokens} tokens",
            needed=f"at most {most}, as {MOST_TOKENS} says",
            hint=f"raise {MOST_TOKENS} on every rank, or unset it to let ranks agree at every call",
        )
    return most


def _most_tokens() -> int | None:
    text = os.environ.get(MOST_TOKENS, "").strip()
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise LayoutError(
            f"{MOST_TOKENS} cannot be read",
            found=repr(text),
            needed="a whole number of at least 1",
            hint=f"export {MOST_TOKENS}=8192 on every rank, or unset it",
        )
    return int(text)


def _settle(group: Any, device: torch.device) -> None:
    """Wait until no rank reads the old buffer any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group=group)


def _free(buffer: Any) -> None:
    destroy = getattr(buffer, "destroy", None)
    if destroy is not None:
        destroy()
