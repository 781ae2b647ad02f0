"""quantize_experts: from floating weights to quantized ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts.errors import UnsupportedScheme
from routed_experts.quantization.checks import check_scheme
from routed_experts.quantization.formats import Quantization
from routed_experts.quantization.reference import quantize
from routed_experts.sharding import mark_share
from routed_experts.weights import TENSOR_NAMES, ExpertWeights

_KEPT = (
    "activation",
    "gate",
    "swiglu_limit",
    "swiglu_alpha",
    "has_gate",
    "is_transposed",
    "is_concatenated",
    "post_expert_norm",
    "num_experts",
)


def quantize_experts(
    weights: ExpertWeights,
    fmt: str,
    *,
    block: tuple[int, int] | None = None,
    scale_dtype: torch.dtype | None = None,
    activation_scheme: str = "dynamic",
) -> ExpertWeights:
    """Quantize floating experts; every flag, bias, gate and norm is kept, and biases stay as they are.

    Args:
        weights: experts that are not quantized.
        fmt: ``fp8_block``, ``mxfp8``, ``fp8_tensor`` or ``mxfp4``; ``block`` and ``scale_dtype`` as in Quantization.
        activation_scheme: ``dynamic``; a static scheme needs scales that only calibration has.

    Raises:
        LayoutError: sizes, blocks or flags that the format cannot have, weights that are not finite.
        UnsupportedScheme: quantized weights, or a static scheme.
    """
    bound = weights.bind()
    if bound.quantization is not None:
        raise UnsupportedScheme(
            "the experts are quantized already",
            found=str(bound.quantization),
            needed="floating weights",
            hint="quantize the weights that these were made of",
        )
    scheme = Quantization(fmt, block, activation_scheme, scale_dtype)
    if scheme.activation_scheme == "static":
        raise UnsupportedScheme(
            "static scales of activations cannot be made from weights",
            found='activation_scheme="static"',
            needed='activation_scheme="dynamic"',
            hint="give calibrated gate_up_proj_activation_scale and down_proj_activation_scale to ExpertWeights",
        )
    up = "gate_up_proj" if bound.has_gate else "up_proj"
    _check(bound, scheme, up)
    tensors = dict(bound._tensors)
    for name, halves in ((up, bound.has_gate), ("down_proj", False)):
        tensors[name], tensors[f"{name}_scale_inv"] = _quantize(bound, name, scheme, halves)
    kept: dict[str, Any] = {name: getattr(bound, name) for name in _KEPT}
    quantized = ExpertWeights(**{name: tensors[name] for name in TENSOR_NAMES}, **kept, quantization=scheme)  # type: ignore[arg-type]
    if bound.shard:
        mark_share(quantized, *bound.shard)
    return quantized


def _check(experts: ExpertWeights, scheme: Quantization, up: str) -> None:
    """Refuse what the format cannot have before anything is allocated."""
    as_if: dict[str, Tensor | None] = dict.fromkeys((f"{up}_scale_inv", "down_proj_scale_inv"), experts.down_weight)
    check_scheme(as_if, scheme, experts.has_gate, experts.is_transposed, experts.is_concatenated)
    width = experts.intermediate_size * (2 if experts.has_gate else 1)
    scheme.scale_shape(experts.num_experts, width, experts.hidden_size, experts.has_gate)
    scheme.scale_shape(experts.num_experts, experts.hidden_size, experts.intermediate_size)


def _quantize(experts: ExpertWeights, name: str, scheme: Quantization, halves: bool) -> tuple[Tensor, Tensor]:
    """Quantize one projection, an expert at a time: a float32 copy of the layer would be twice as large as it."""
    stack = experts._tensors[name]
    assert stack is not None  # it is one of the two projections
    done = [_one(matrix, experts, scheme, halves) for matrix in stack]
    weight, scale = (_stacked(parts) for parts in zip(*done, strict=True))
    return weight, scale


def _one(matrix: Tensor, experts: ExpertWeights, scheme: Quantization, halves: bool) -> tuple[Tensor, Tensor]:
    matrix = matrix.mT if experts.is_transposed else matrix  # (N, K)
    block = scheme.block if scheme.fmt == "fp8_block" else None
    if scheme.block is None and halves:
        weight, scale = _by_half(matrix, experts.is_concatenated, scheme)
    else:
        if block is not None:
            block = (scheme.row_block(matrix.shape[0], halves), block[1])
        weight, scale = quantize(matrix, scheme.fmt, block=block, scale_dtype=scheme.scale_dtype)
    if not experts.is_transposed:
        return weight, scale
    return weight.mT.contiguous(), scale if scheme.block is None else scale.mT.contiguous()


def _by_half(matrix: Tensor, concatenated: bool, scheme: Quantization) -> tuple[Tensor, Tensor]:
    """A scale for the gate and one for the up rows: (N, K) and (2, 1)."""
    inner = matrix.shape[0] // 2
    halves = matrix.unflatten(0, (2, inner) if concatenated else (inner, 2))
    halves = halves if concatenated else halves.transpose(0, 1)
    weight, scale = quantize(halves, scheme.fmt, scale_dtype=scheme.scale_dtype)
    weight = weight if concatenated else weight.view(torch.uint8).transpose(0, 1).contiguous().view(weight.dtype)
    return weight.reshape(matrix.shape), scale.reshape(2, 1)


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    """torch.stack by bytes, where they are 8-bit floats that not every version stacks."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.stack(parts)
    return torch.stack([part.view(torch.uint8) for part in parts]).view(dtype)
