"""Small experts and inputs of unit scale for the tests of run_experts."""

from __future__ import annotations

import torch

import routed_experts as rx

RUNNABLE = ("eager", "batched_mm", "grouped_mm", "auto")


def make(experts=4, hidden=8, inner=6, *, dtype=torch.float32, seed=0, grad=False, **flags):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "gate_up_proj": torch.randn(experts, 2 * inner, hidden, generator=g) * hidden**-0.5,
        "down_proj": torch.randn(experts, hidden, inner, generator=g) * inner**-0.5,
    }
    tensors = {name: t.to(dtype).requires_grad_(grad) for name, t in tensors.items()}
    return rx.ExpertWeights(**tensors, **flags), tensors


def inputs(tokens=5, top_k=2, experts=4, hidden=8, *, dtype=torch.float32, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    return x, torch.randint(0, experts, (tokens, top_k), generator=g), torch.rand(tokens, top_k, generator=g)
