"""What run_experts refuses before anything is changed or allocated."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from routed_experts.errors import DeviceError, DtypeError, ExpertIndexError, GradientUnsupported, LayoutError
from routed_experts.facts import CHECKED, environment_checks
from routed_experts.layout import ID_CODES, INT32_LIMIT, first_out_of_range
from routed_experts.weights import TENSOR_NAMES, ExpertWeights


def check_call(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> None:
    """Check types, shapes and devices of a call: (T, H), (T, K) and (T, K) beside the experts' H."""
    for name, value in (
        ("hidden_states", hidden_states),
        ("top_k_index", top_k_index),
        ("top_k_weights", top_k_weights),
    ):
        if not isinstance(value, Tensor):
            raise DtypeError(
                f"{name} is not a tensor",
                found=type(value).__name__,
                needed="torch.Tensor",
                hint=f"torch.as_tensor({name})",
            )
    if hidden_states.dim() != 2 or hidden_states.shape[1] != experts.hidden_size:
        raise LayoutError(
            "hidden_states has the wrong shape",
            found=str(tuple(hidden_states.shape)),
            needed=f"(T, {experts.hidden_size}): tokens flattened, H={experts.hidden_size}",
            hint="hidden_states.reshape(-1, H) before the experts, and back after them",
        )
    tokens = hidden_states.shape[0]
    if top_k_index.dim() != 2 or top_k_index.shape[0] != tokens:
        raise LayoutError(
            "top_k_index has the wrong shape",
            found=str(tuple(top_k_index.shape)),
            needed=f"(T, K) with T={tokens}: the experts of every token",
            hint="one row of ids a token: top_k_index.view(T, K)",
        )
    if top_k_weights.shape != top_k_index.shape:
        raise LayoutError(
            "top_k_weights has the wrong shape",
            found=str(tuple(top_k_weights.shape)),
            needed=f"{tuple(top_k_index.shape)}, one weight for each id of top_k_index",
            hint="gather the router's (T, E) scores by top_k_index first",
        )
    # Compiled code checks when it runs: here it would be a limit on every traced shape.
    if not torch.compiler.is_compiling() and top_k_index.numel() >= INT32_LIMIT:
        raise LayoutError(
            "pairs are numbered in int32",
            found=f"T * K = {top_k_index.numel()}",
            needed="less than 2**31",
            hint="split the tokens over several calls",
        )
    _check_dtypes(hidden_states, top_k_index, top_k_weights, experts)
    _check_devices(hidden_states, top_k_index, top_k_weights, experts)
    if wants_quantized_grad(experts):
        raise GradientUnsupported(
            "quantized weights have no gradient",
            found=", ".join(name for name in _QUANTIZED if _is_asked(experts, name)) + " with requires_grad=True",
            needed="quantized weights and scales with requires_grad=False",
            hint="call requires_grad_(False) on them (gradients of inputs, routing weights and biases remain), or run "
            "under torch.no_grad()",
        )


_QUANTIZED = [name for name in TENSOR_NAMES if not name.endswith("_bias")]


def wants_quantized_grad(experts: ExpertWeights) -> bool:
    """Whether a gradient is asked of something that is quantized, or of its scales."""
    if experts.quantization is None or not torch.is_grad_enabled():
        return False
    return any(_is_asked(experts, name) for name in _QUANTIZED)


def _is_asked(experts: ExpertWeights, name: str) -> bool:
    tensor = experts._tensors[name]
    return tensor is not None and tensor.requires_grad


def _check_dtypes(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> None:
    if top_k_index.dtype not in ID_CODES:
        raise DtypeError(
            "top_k_index is not integer",
            found=str(top_k_index.dtype),
            needed="integer expert ids",
            hint="pass the indices of topk, neither a mask nor scores",
        )
    if not top_k_weights.is_floating_point():
        raise DtypeError(
            "top_k_weights is not floating",
            found=str(top_k_weights.dtype),
            needed="a floating dtype",
            hint="pass the values of topk, or top_k_weights.float()",
        )
    if not hidden_states.is_floating_point():
        raise DtypeError(
            "hidden_states is not floating",
            found=str(hidden_states.dtype),
            needed="a floating dtype",
            hint=f"hidden_states.to({experts.dtype})",
        )


def _check_devices(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> None:
    device = hidden_states.device
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        if tensor.device != device:
            raise DeviceError(
                f"{name} is on another device",
                found=f"{name} on {tensor.device}",
                needed=f"{device}, as hidden_states",
                hint=f'{name}.to("{device}")',
            )
    if experts.device != device:
        name = next(name for name in TENSOR_NAMES if getattr(experts, name) is not None)
        raise DeviceError(
            "the experts are on another device than the tokens",
            found=f"{name} on {experts.device}, hidden_states on {device}",
            needed="one device",
            hint="materialise the offloaded weights first" if experts.device.type == "meta" else f'.to("{device}")',
        )


def compute_dtype(hidden_states: Tensor, experts: ExpertWeights, allow_cast: bool) -> torch.dtype:
    """The dtype the products run in: autocast's, else the weights', which the tokens must share or be cast to.

    Quantized weights go along with the tokens' dtype, under autocast too.
    """
    if experts.quantization is not None:
        return _quantized_dtype(hidden_states, allow_cast)
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind) and experts.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden_states.dtype != experts.dtype and not allow_cast:
        raise DtypeError(
            "hidden_states and the experts' weights have different dtypes",
            found=f"hidden_states {hidden_states.dtype}, weights {experts.dtype}",
            needed="one dtype, or autocast",
            hint="pass allow_cast=True to compute in the weights' dtype",
        )
    return experts.dtype


def _quantized_dtype(hidden_states: Tensor, allow_cast: bool) -> torch.dtype:
    if hidden_states.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return hidden_states.dtype
    if allow_cast and hidden_states.dtype == torch.float64:
        return torch.float32
    raise DtypeError(
        "quantized experts do not compute in this dtype",
        found=f"hidden_states {hidden_states.dtype}",
        needed="float32, bfloat16 or float16",
        hint="pass allow_cast=True to compute float64 in float32",
    )


def is_checked(checked: bool | None) -> bool:
    """Whether ids are to be checked: the argument, else ROUTED_EXPERTS_CHECKED."""
    if checked is not None:
        return checked
    if torch.compiler.is_compiling():  # which guards on os.environ, and not on what lies below it
        return os.environ.get(CHECKED, "") not in ("", "0")
    return environment_checks()


def check_ids(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Return the ids; raise ExpertIndexError for the first one outside 0..E-1. Waits for the device."""
    if torch.compiler.is_compiling():
        return torch.ops.routed_experts.checked_ids(top_k_index, num_experts)
    found = first_out_of_range(top_k_index, num_experts)
    if found is not None:
        token, slot, value = found
        raise ExpertIndexError(
            "an expert id is out of range",
            found=f"top_k_index[{token}, {slot}] = {value}",
            needed=f"0 <= id < {num_experts}",
            hint="pass expert_parallel=True if ids outside the range mean 'not an expert of this rank'",
        )
    return top_k_index


@torch.library.custom_op("routed_experts::checked_ids", mutates_args=())
def _checked_ids(top_k_index: Tensor, num_experts: int) -> Tensor:
    # A copy, since an operator may not return its input; depending on it keeps the check in the graph.
    return check_ids(top_k_index, num_experts).clone()


@_checked_ids.register_fake
def _(top_k_index: Tensor, num_experts: int) -> Tensor:
    return torch.empty_like(top_k_index)
