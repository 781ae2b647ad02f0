"""`sonicmoe`: SonicMoE's fused kernels, with their own backward."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Requirement, Spec
from routed_experts.combine import attach
from routed_experts.loaders import load_kernel
from routed_experts.weights import ExpertWeights

# The kernel's GELU is the tanh approximation.
_TYPES = {"silu": "SWIGLU", "gelu_tanh": "GEGLU", "gelu": "GEGLU", "relu": "REGLU"}

_MACHINE = (
    {"kind": "kernel", "name": "sonicmoe", "package": "kernels", "installed": "sonicmoe"},
    {"kind": "capability", "min": (9, 0)},
    {"kind": "package", "name": "nvidia-cutlass-dsl", "min": "4.6.0"},
    {"kind": "package", "name": "apache-tvm-ffi", "min": "0.1.10"},
    {"kind": "python", "min": "3.12"},
    {"kind": "kernel_loads", "name": "sonicmoe"},
)

_warned: list[str] = []


def run(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run the experts of every token and sum over slots: bfloat16 (T, H); differentiable."""
    tokens, slots = index_TK.shape
    if tokens == 0 or slots == 0:
        return attach(torch.zeros_like(x_TH), x_TH, weights_TK, *experts.tensors())
    kernel = load_kernel("sonicmoe")
    expert_TK = index_TK.long()
    real_TK = (expert_TK >= 0) & (expert_TK < experts.num_experts)
    # The kernel drops ids from E on, and does not know negative ones; older builds still add their weighted row.
    expert_S = expert_TK.masked_fill(~real_TK, experts.num_experts).int().reshape(-1)
    scores_S = weights_TK.float().masked_fill(~real_TK, 0).reshape(-1)
    token_S = torch.arange(tokens, dtype=torch.int32, device=x_TH.device).repeat_interleave(slots)
    axes = (2, 1, 0) if experts.is_transposed else (1, 2, 0)
    up_bias, down_bias = _biases(experts)
    out, _ = kernel.run(
        x_TH.contiguous(),
        scores_S,
        token_S,
        expert_S,
        experts.up_weight.permute(axes),
        up_bias,
        experts.down_weight.permute(axes),
        down_bias,
        E=experts.num_experts,
        stream_id=None,
        activation_type=getattr(kernel.activation_type, _TYPES[experts.activation_name or ""]),
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=experts.is_concatenated,
    )
    result: Tensor = out
    return result


def run_approximated(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As ``run``, for exact gelu: says once that the kernel computes its tanh approximation."""
    if not _warned:
        _warned.append("gelu")
        warnings.warn(
            "routed-experts: sonicmoe computes gelu by its tanh approximation (gelu_pytorch_tanh), which differs from "
            "the exact gelu of these experts by up to about 5e-4 a value",
            UserWarning,
            stacklevel=2,
        )
    return run(experts, x_TH, index_TK, weights_TK)


for _function in (run, run_approximated):
    _function.load = partial(load_kernel, "sonicmoe")  # type: ignore[attr-defined]


def _biases(experts: ExpertWeights) -> tuple[Tensor | None, Tensor | None]:
    """Both biases or neither, (E, 2I) and (E, H): one that is missing is 0."""
    up, down = experts.up_bias, experts.down_proj_bias
    if up is None and down is None:
        return None, None
    count, width = experts.num_experts, experts.up_weight.new_zeros
    up = width(count, 2 * experts.intermediate_size) if up is None else up
    return up, width(count, experts.hidden_size) if down is None else down


def _requires(*activations: str) -> tuple[Requirement, ...]:
    return (
        {"kind": "gated"},
        {"kind": "no_post_expert_norm"},
        {"kind": "no_own_gate"},
        {"kind": "activation", "any_of": list(activations)},
        {"kind": "no_swiglu_limit"},
        {"kind": "no_swiglu_alpha"},
        {"kind": "dtype", "any_of": ["bfloat16"]},
        {"kind": "unquantized"},
        {"kind": "weights_aligned", "bytes": 16},
        {"kind": "not_compiling"},
        *_MACHINE,
    )


# Measured in transformers over the same kernel; exact gelu is run only for those who ask by name.
_COST = {"cuda": Cost(call_us=800, bytes_per_us=2e6, flops_per_us=5e8)}
BACKEND = Backend(
    rows=(
        (
            Spec(name="sonicmoe", devices=("cuda",), requires=_requires("silu", "gelu_tanh", "relu"), cost=_COST),
            run,
        ),
        (
            Spec(
                name="sonicmoe",
                path="approximate-gelu",
                devices=("cuda",),
                requires=_requires("gelu"),
                cost=_COST,
                auto=False,
            ),
            run_approximated,
        ),
    )
)
