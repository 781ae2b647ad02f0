"""Our backends in the form that transformers' registries of experts functions hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from routed_experts.calling import ARGUMENTS, call_experts, is_expert_parallel
from routed_experts.names import parse_name, to_config

# Keywords under which some families pass the ids and weights.
_OTHER_NAMES = {"router_indices": "top_k_index", "routing_weights": "top_k_weights"}

ExpertsForward = Callable[..., torch.Tensor]


def forward_for(name: str) -> ExpertsForward:
    """Return the experts function of a backend: ``(module, hidden_states, top_k_index, top_k_weights) -> tensor``.

    ``name`` is bare or prefixed; the same name gives the same function. Hidden states are (T, H), ids and weights
    (T, K), the result (T, H); ``process_group`` and the other keywords of ``run_experts`` are passed on.

    Raises:
        UnknownBackend: a name that is not registered.
    """
    return _forward(parse_name(name))


@functools.cache
def _forward(backend: str) -> ExpertsForward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            for theirs, ours in _OTHER_NAMES.items():
                if theirs in kwargs:
                    kwargs[ours] = kwargs.pop(theirs)
        # Releases that do not say whether experts are split may have split them: foreign ids are then no mistake.
        kwargs["expert_parallel"] = is_expert_parallel(module, True)
        return call_experts(module, backend, ARGUMENTS, args, kwargs)

    forward.__name__ = forward.__qualname__ = f"{to_config(backend)}_forward"
    return forward
