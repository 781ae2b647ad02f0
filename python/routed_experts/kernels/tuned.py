"""Tiles that `routed-experts tune` measured for a call, where it did."""

from __future__ import annotations

import torch

from routed_experts.backends.registry import REGISTRY
from routed_experts.facts import facts_for
from routed_experts.kernels.choice import Sizes
from routed_experts.problem import bucket, dtype_name, problem_fields
from routed_experts.tuning.profile import has_tiles, measured_tiles
from routed_experts.tuning.tiles import Tiles
from routed_experts.weights import ExpertWeights


def tiles_of(experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tiles | None:
    """Return the measured tiles of both products, None where the built-in ones are to be taken.

    Calls without a plan ask every time, so an answer is kept beside the layout until more is measured.
    """
    if not has_tiles():
        return None
    key = ("tiles", REGISTRY.generation, bucket(sizes.tokens), sizes.slots, dtype, device)
    if key not in experts._plans:
        experts._plans[key] = measured_tiles(facts_for(device), as_problem(experts, sizes, dtype))
    found: Tiles | None = experts._plans[key]
    return found


def as_problem(experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype) -> dict[str, object]:
    """A call without gradients as far as tiles depend on it."""
    call = {"num_tokens": sizes.tokens, "num_top_k": sizes.slots, "dtype": dtype_name(dtype), "training": False}
    return {**problem_fields(experts), **call}
