"""Compile what a call that is differentiated launches, for devices that are not here; see compile_kernels.py."""

from __future__ import annotations

import sys

import torch
from compile_kernels import SHARED, compile_launch

import routed_experts as rx
from routed_experts.kernels import backward, fused, steps, training
from routed_experts.kernels.choice import Device

CALLS = (
    (torch.bfloat16, True, 4096, (8, 2048, 1024)),
    (torch.bfloat16, False, 24, (4, 72, 40)),
    (torch.float32, True, 24, (4, 72, 40)),
)


def differentiate(dtype, gated, tokens, shape):
    """Forward and backward of every step, on memory of its shapes."""
    experts, hidden, inner = shape
    up = torch.empty(experts, inner * (1 + gated), hidden, dtype=dtype)
    name = "gate_up_proj" if gated else "up_proj"
    tensors = {name: up, "down_proj": torch.empty(experts, hidden, inner, dtype=dtype)}
    tensors |= {key + "_bias": torch.empty(t.shape[:2], dtype=dtype) for key, t in tensors.items()}
    weights = rx.ExpertWeights(**tensors)
    ids, scale = torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)
    rows = {"whole": (tokens, hidden), "down": (2 * tokens, inner), "weigh": (2 * tokens, hidden)}
    for step, size in rows.items():
        given = torch.empty(size, dtype=dtype), ids, None if step == "down" else scale
        out, kept = training.forward(step, weights, *given, True)
        training.backward(step, weights, *given, kept, torch.empty_like(out), [True] * 8)


def main():
    for capability in map(int, sys.argv[1:]):
        device = Device(divmod(capability, 10), SHARED[capability])

        def launch(one, capability=capability):
            made = compile_launch(one, capability)
            print(capability, one.kernel.__name__, made.metadata.shared, SHARED[capability])

        fused.launch = launch
        for module in (fused, training, backward, steps):
            module.limits = lambda _, device=device: device
        for call in CALLS:
            differentiate(*call)


if __name__ == "__main__":
    main()
