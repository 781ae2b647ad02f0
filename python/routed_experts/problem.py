"""What is asked of the experts, as the plain data that the Rust core reads."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from routed_experts.reshaped import reshaped_by

# No kernel asks for more, and allocators do not promise more.
_MOST_ALIGNED = 128
_SCALE_NAMES = {"float8_e8m0fnu": "ue8m0", "uint8": "ue8m0"}


def bucket(num_tokens: int) -> int:
    """Round a token count up to three significant bits; exact to 16, at most 25% above.

    Choices are made for the bucket and not for the first count seen in it, so they do not depend on history.
    """
    if not isinstance(num_tokens, int) or num_tokens <= 16:
        return num_tokens  # what is no count is refused later, with a reason
    shift = (num_tokens - 1).bit_length() - 3
    return (((num_tokens - 1) >> shift) + 1) << shift


def problem_fields(experts: Any) -> dict[str, Any]:
    """Return the part of a problem that the experts themselves decide."""
    up = experts.gate_up_proj if experts.gate_up_proj is not None else experts.up_proj
    weights = (up, experts.down_proj)
    return {
        "num_experts": experts.num_experts,
        "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size,
        "weight_dtype": dtype_name(up.dtype),
        "has_gate": experts.has_gate,
        "is_transposed": experts.is_transposed,
        "is_concatenated": experts.is_concatenated,
        "has_bias": experts.has_bias,
        "activation": experts.activation_name,
        "own_gate": experts.own_gate,
        "swiglu_limit": experts.swiglu_limit,
        "swiglu_alpha": experts.swiglu_alpha,
        "has_post_expert_norm": experts.post_expert_norm is not None,
        "quantization": _quantization(experts.quantization),
        "experts_scattered": not all(map(_packed, weights)),
        "reshaped_by": reshaped_by(weights[1]),
        "weight_alignment": math.gcd(*(_alignment(weight) for weight in weights)),
        "device_span": len({weight.device for weight in weights}),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _quantization(quantization: Any) -> dict[str, Any] | None:
    if quantization is None:
        return None
    scale = dtype_name(quantization.scale_dtype)
    block = quantization.block
    return {
        "fmt": quantization.fmt,
        "block": None if block is None else tuple(block),
        "activation_scheme": quantization.activation_scheme,
        "scale_dtype": _SCALE_NAMES.get(scale, scale),
    }


def _alignment(weight: torch.Tensor) -> int:
    """Return the bytes to which the rows of ``weight`` (E, rows, columns) are aligned, forward and backward.

    Rows follow the last two strides, one of which must be 1; activations and gradients have both widths as
    rows; and the first element counts too (torch's CPU kernel to 2.10).
    """
    # Under torch.compile sizes may be symbols, which gcd does not take.
    rows, columns, height, width = map(operator.index, (*weight.stride()[-2:], *weight.shape[-2:]))
    if 1 not in (rows, columns):
        return 1
    lengths = (rows if columns == 1 else columns, height, width)
    return math.gcd(*(length * weight.element_size() for length in lengths), _address(weight), _MOST_ALIGNED)


def _packed(weight: torch.Tensor) -> bool:
    """Whether each expert's matrix fills its place, so that experts lie one after the other."""
    return operator.index(weight.stride(0)) == operator.index(weight.shape[1]) * operator.index(weight.shape[2])


def _address(weight: torch.Tensor) -> int:
    # Without storage, on meta or under a tracer, where it will lie is not known; allocators align.
    if torch.compiler.is_compiling() or weight.is_meta:
        return 0
    try:
        return weight.data_ptr()
    except RuntimeError:
        return 0
