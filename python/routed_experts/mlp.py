"""The formula of one expert, with its two products left to the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from routed_experts.gates import apply_gate

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights


def expert_mlp(
    experts: ExpertWeights, x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
) -> Tensor:
    """Up, gate, down and the norm after it: (rows, H) -> (rows, H), not yet weighted.

    ``up`` is (rows, H) -> (rows, N) and ``down`` (rows, I) -> (rows, H), biases included.
    """
    out = down(apply_gate(experts, up(x)))
    norm = experts.post_expert_norm
    return out if norm is None else norm(out)
