"""The short way of a call whose like has run before: one key, one look-up, and the backend.

What the checks allow, the dtype to compute in and the choice of a backend depend on the layout of the weights and on
what :func:`call_key` lists, never on what tensors hold. So the first call of a kind goes the long way in moe.py, and
leaves beside the layout (``ExpertWeights._prepared``) what was decided. Refusals are not kept, and calls that a key
does not describe (ids to be checked, subclasses of tensors, other devices) always go the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled

from routed_experts.backends.registry import REGISTRY
from routed_experts.checks import wants_quantized_grad
from routed_experts.combine import wants_grad
from routed_experts.facts import environment, environment_checks
from routed_experts.selection import Selection
from routed_experts.weights import ExpertWeights

if TYPE_CHECKING:
    from routed_experts.moe import Call

# A server sees every number of tokens up to its largest batch; prompts of ever new lengths must not pile up.
_MOST_PREPARED = 512

# What torch.cuda.is_current_stream_capturing calls, without the call around it.
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


# Where a key says whether a gradient is wanted.
_WANTS_GRADIENT = 14


class Prepared(NamedTuple):
    """What was decided for calls of one key."""

    row: Selection
    run: Callable[..., Any] | None  # the row's function where it takes the routing and gives tokens
    shape: torch.Size  # of hidden_states and of the result
    given: torch.dtype  # of hidden_states and of the result
    computed: torch.dtype  # the products run in it


def call_key(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertWeights,
    backend: str | None,
    expert_parallel: bool,
    checked: bool | None,
    allow_cast: bool,
    weights_on: str,
    process_group: Any,
) -> tuple[Any, ...] | None:
    """Return all that decides a call over one layout of weights; None for a call that must go the long way."""
    if not (type(x_TH) is Tensor and type(index_TK) is Tensor and type(weights_TK) is Tensor):
        return None
    if not ((backend is None or type(backend) is str) and type(weights_on) is str):
        return None
    if (environment_checks() if checked is None else checked) and not expert_parallel:
        return None
    if experts.quantization is not None and wants_quantized_grad(experts):
        return None  # refused on the long way
    if x_TH.is_cuda:
        kind, capturing = "cuda", _is_capturing()
    elif x_TH.is_cpu:
        kind, capturing = "cpu", False
    else:
        return None
    return (
        x_TH.shape,
        x_TH.dtype,
        x_TH.device,
        index_TK.shape,
        index_TK.dtype,
        index_TK.device,
        weights_TK.shape,
        weights_TK.dtype,
        weights_TK.device,
        backend,
        not expert_parallel,
        not allow_cast,
        weights_on,
        process_group is None,
        is_grad_enabled() and wants_grad(x_TH, weights_TK, *experts._tensors.values()),
        is_autocast_enabled(kind) and get_autocast_dtype(kind),
        capturing,
        REGISTRY.generation,
        environment(kind),
    )


def keep(row: Selection, call: Call, weights_on: str, key: tuple[Any, ...] | None) -> None:
    """Keep what was decided for a call, and so for all calls of its key over its layout."""
    if key is None:
        return
    kept = call.experts._prepared
    if len(kept) >= _MOST_PREPARED:
        kept.clear()
    straight = (row.spec.takes, row.spec.gives, weights_on) == ("routing", "tokens", "output")
    run = row.run if straight and call.x_TH.numel() and call.index_TK.numel() else None
    # A run function may bring a shorter one for calls like this one, as long as no gradient is wanted.
    repeated = getattr(run, "repeated", None)
    if repeated is not None and not key[_WANTS_GRADIENT]:
        run = repeated(call.experts) or run
    kept[key] = Prepared(row, run, call.x_TH.shape, call.dtype, call.x_TH.dtype)
