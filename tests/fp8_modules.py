"""transformers' FP8Experts built on a CPU and filled with quantized weights of ours."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.integrations import finegrained_fp8, moe

import routed_experts as rx

E, H, I = 4, 64, 32  # noqa: E741 (the contract's letters)
# Arguments of FP8Experts, and of quantize_experts for what it then holds.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": ({"block_size": (16, 16)}, {"fmt": "fp8_block", "block": (16, 16)}),
    "short blocks": ({"block_size": [24, 24]}, {"fmt": "fp8_block", "block": (24, 24)}),
    "powers of two": (
        {"block_size": (16, 16), "scale_fmt": "ue8m0"},
        {"fmt": "fp8_block", "block": (16, 16), "scale_dtype": torch.float8_e8m0fnu},
    ),
    "mx": ({"block_size": [1, 32], "scale_fmt": "ue8m0"}, {"fmt": "mxfp8"}),
    "tensor": ({"block_size": None}, {"fmt": "fp8_tensor"}),
    "fp4": ({"block_size": (128, 128), "expert_dtype": "fp4", "scale_fmt": "ue8m0"}, {"fmt": "mxfp4"}),
    "fp4, float scales": (
        {"block_size": (128, 128), "expert_dtype": "fp4"},
        {"fmt": "mxfp4", "scale_dtype": torch.float32},
    ),
}


def config(**more: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, hidden_act="silu", **more)


def experts_class(has_gate: bool = True) -> type:
    """A class of its own, since transformers wraps the one it has again for every module it replaces."""
    own = type("OwnFP8Experts", (finegrained_fp8.FP8Experts,), {})
    decorate = moe.use_experts_implementation(
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=has_gate
    )
    return decorate(own)


def weights(kind: str, *, has_gate: bool = True, inner: int = I, seed: int = 0, **flags: Any) -> rx.ExpertWeights:
    """Quantized experts of the shapes that the module has."""
    generator = torch.Generator().manual_seed(seed)
    inner = 48 if kind == "short blocks" else inner
    up, width = ("gate_up_proj", 2 * inner) if has_gate else ("up_proj", inner)
    tensors = {
        up: torch.randn(E, width, H, generator=generator) / H**0.5,
        "down_proj": torch.randn(E, H, inner, generator=generator) / inner**0.5,
    }
    return rx.quantize_experts(rx.ExpertWeights(**tensors, **flags), **KINDS[kind][1])


def build(kind: str, *, has_gate: bool = True, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    """A module that holds ``weights(kind)``."""
    settings = {"moe_intermediate_size": 48} if kind == "short blocks" else dict(settings or {})
    made = config()
    for name, value in settings.items():
        setattr(made, name, value)
    module = experts_class(has_gate)(made, has_gate=has_gate, **KINDS[kind][0], **more)
    fill(module, weights(kind, has_gate=has_gate))
    return module


def fill(module: Any, experts: rx.ExpertWeights) -> None:
    """Copy the stored bytes into the module's own parameters, whose shapes and dtypes have to be the same."""
    for name, tensor in experts._tensors.items():
        if tensor is not None:
            own = getattr(module, name)
            assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
            own.data.view(torch.uint8).copy_(tensor.view(torch.uint8))
