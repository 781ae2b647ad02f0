"""A plain float64 loop over experts: what every module of these tests must compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def experts_loop(
    module: nn.Module,
    gate: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """(T, H) in float64 from the module's parameters; ``gate`` leads from first product to second."""
    up_name = "gate_up_proj" if getattr(module, "gate_up_proj", None) is not None else "up_proj"
    up, up_bias = getattr(module, up_name).double(), getattr(module, f"{up_name}_bias", None)
    down, down_bias = module.down_proj.double(), getattr(module, "down_proj_bias", None)
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(x.shape[1], dtype=torch.float64)
        for e, w in zip(index[t].tolist(), weights[t].double(), strict=True):
            if not 0 <= e < module.num_experts:
                continue
            u = x[t].double() @ (up[e] if module.is_transposed else up[e].T)
            u = gate(u if up_bias is None else u + up_bias[e].double())
            d = u @ (down[e] if module.is_transposed else down[e].T)
            d = d if down_bias is None else d + down_bias[e].double()
            norm = getattr(module, "post_expert_norm", None)
            row = row + w * (d if norm is None else norm(d))
        rows.append(row)
    return torch.stack(rows) if rows else x.double()


def draw_parameters(module: nn.Module, seed: int = 0) -> None:
    """Redraw an experts module at unit gain, biases included: a normal of variance 1 / fan-in."""
    generator = torch.Generator().manual_seed(seed)
    fan_in_axis = -2 if getattr(module, "is_transposed", False) else -1
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter.shape[fan_in_axis] if parameter.ndim == 3 else 1
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / fan_in**0.5)


def routing(tokens: int, slots: int, experts: int, hidden: int, **kinds: Any) -> tuple[torch.Tensor, ...]:
    """Hidden states (T, H), ids (T, K) that repeat experts and leave some empty, weights (T, K)."""
    generator = torch.Generator().manual_seed(tokens + 7)
    x = torch.randn(tokens, hidden, generator=generator).to(**kinds)
    index = torch.randint(0, max(1, experts - 1), (tokens, slots), generator=generator)
    return x, index, torch.rand(tokens, slots, generator=generator)
