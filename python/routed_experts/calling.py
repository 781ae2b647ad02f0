"""From the call of a module's forward to run_experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from routed_experts.moe import run_experts

_SPLIT = "_is_expert_parallel"
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def call_experts(
    module: nn.Module, backend: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Run ``module``'s experts on ``backend`` with the arguments of a call of its forward.

    ``names`` are the module's own names of (hidden_states, top_k_index, top_k_weights); families differ in
    them and some models pass them by keyword. Other keywords go on to ``run_experts``.
    """
    if kwargs and len(args) < len(names):
        args += tuple([kwargs.pop(name) for name in names[len(args) :] if name in kwargs])
    kwargs["experts"], kwargs["backend"] = module, backend
    if "expert_parallel" not in kwargs:
        kwargs["expert_parallel"] = is_expert_parallel(module, False)
    return run_experts(*args, **kwargs)


def is_expert_parallel(module: nn.Module, default: bool) -> bool:
    """Return what transformers says in ``module._is_expert_parallel``; ``default`` where it says nothing."""
    # nn.Module takes 1 us to find that something is missing.
    if not torch.compiler.is_compiling() and _SPLIT not in module.__dict__:
        cls = type(module)
        if cls.__getattr__ is nn.Module.__getattr__ and not hasattr(cls, _SPLIT):
            return default
    return bool(getattr(module, _SPLIT, default))


def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the first three arguments of an unbound ``forward(self, ...)``, or fewer.

    A forward that only takes ``*args`` says nothing about its names: it gets the common ones.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ARGUMENTS
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[:3]
