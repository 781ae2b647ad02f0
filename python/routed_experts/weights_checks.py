"""What ExpertWeights refuses, before anything is held: flags that contradict each other, shapes that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from routed_experts.errors import DeviceError, DtypeError, LayoutError, UnsupportedScheme
from routed_experts.quantization.checks import check_grids, check_scheme, check_stored, logical_shape
from routed_experts.quantization.formats import Quantization

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_declaration(
    tensors: dict[str, Tensor | None],
    *,
    has_gate: bool | None,
    activation: str | Callable[[Tensor], Tensor],
    gate: Callable[[Tensor], Tensor] | None,
    swiglu_limit: float | None,
    swiglu_alpha: float | None,
    post_expert_norm: Callable[[Tensor], Tensor] | None,
    **_: Any,
) -> bool:
    """Return whether the experts are gated; raise LayoutError or DtypeError for flags that contradict."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise DtypeError(
                f"{name} is not a tensor",
                found=type(value).__name__,
                needed="torch.Tensor or None",
                hint=f"torch.as_tensor({name})",
            )
    given = [name for name in ("gate_up_proj", "up_proj") if tensors[name] is not None]
    if len(given) != 1:
        raise LayoutError(
            "exactly one first projection is needed",
            found=" and ".join(given) or "neither",
            needed="gate_up_proj for gated experts, or up_proj for experts without a gate",
            hint="gate_up_proj is (E, 2I, H), up_proj (E, I, H)",
        )
    if tensors["down_proj"] is None:
        raise LayoutError(
            "down_proj is missing",
            found="None",
            needed="a (E, H, I) tensor",
            hint="every expert has a second projection",
        )
    gated = given[0] == "gate_up_proj"
    if has_gate is not None and bool(has_gate) != gated:
        raise LayoutError(
            "has_gate contradicts the projection that was given",
            found=f"has_gate={has_gate} with {given[0]}",
            needed="gate_up_proj with has_gate=True, or up_proj with has_gate=False",
            hint="leave has_gate out: the projection says it",
        )
    stray = "up_proj_bias" if gated else "gate_up_proj_bias"
    if tensors[stray] is not None:
        raise LayoutError(
            f"{stray} has no projection",
            found=f"{stray} with {given[0]}",
            needed=f"{given[0]}_bias",
            hint=f"pass it as {given[0]}_bias, or leave it out",
        )
    _check_callables(activation=activation, gate=gate, post_expert_norm=post_expert_norm)
    _check_gate(gated, activation, gate, swiglu_limit, swiglu_alpha)
    return gated


def _check_callables(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value) and not (name == "activation" and isinstance(value, str)):
            raise DtypeError(
                f"{name} cannot be called",
                found=type(value).__name__,
                needed="a callable",
                hint=f"pass the function or module itself as {name}",
            )
    if given["activation"] is None:
        raise DtypeError(
            "activation is missing", found="None", needed="a name or a callable", hint="'silu' is the default"
        )


def _check_gate(
    gated: bool,
    activation: str | Callable[[Tensor], Tensor],
    gate: Callable[[Tensor], Tensor] | None,
    limit: float | None,
    alpha: float | None,
) -> None:
    extras = [
        name for name, value in (("gate", gate), ("swiglu_limit", limit), ("swiglu_alpha", alpha)) if value is not None
    ]
    if extras and not gated:
        raise LayoutError(
            "experts without a gate take an activation only",
            found=", ".join(extras),
            needed="gate_up_proj",
            hint="drop these arguments, or give the fused gate and up projection",
        )
    if gate is not None and len(extras) > 1:
        raise LayoutError(
            "a gate of one's own already says everything",
            found=", ".join(extras),
            needed="either gate, or swiglu_limit and swiglu_alpha",
            hint="put the limit and the slope into the gate, or leave the gate out",
        )
    if alpha is not None and activation not in ("silu", "swish"):
        raise LayoutError(
            "swiglu_alpha defines the whole gate",
            found=f"activation={activation!r} with swiglu_alpha={alpha}",
            needed="activation='silu'",
            hint="leave activation out, or pass the whole as gate",
        )
    if limit is not None and not limit >= 0:
        raise LayoutError(
            "swiglu_limit is a bound",
            found=repr(limit),
            needed="a number >= 0, or None for no clamp",
            hint="pass its magnitude",
        )


def check_tensors(
    tensors: dict[str, Tensor | None],
    has_gate: bool,
    is_transposed: bool,
    is_concatenated: bool,
    num_experts: int | None,
    quantization: Quantization | None,
) -> tuple[int, int, int]:
    """Return (E, H, I); raise for shapes, dtypes or devices that do not go together."""
    up_name = "gate_up_proj" if has_gate else "up_proj"
    up, down = tensors[up_name], tensors["down_proj"]
    assert up is not None  # check_declaration ran first
    assert down is not None
    check_scheme(tensors, quantization, has_gate, is_transposed, is_concatenated)
    if quantization is None:
        _check_dtypes(tensors)
    else:
        check_stored(tensors, quantization)
    for name, weight in ((up_name, up), ("down_proj", down)):
        if weight.dim() != 3:
            raise LayoutError(
                f"{name} has the wrong rank",
                found=str(tuple(weight.shape)),
                needed="three axes, experts first",
                hint="torch.stack the experts' matrices along a new first axis",
            )
    shapes = {name: logical_shape(tensor, quantization) for name, tensor in ((up_name, up), ("down_proj", down))}
    held, *sizes = shapes["down_proj"]
    experts = held if num_experts is None else num_experts
    hidden, intermediate = reversed(sizes) if is_transposed else sizes
    width = 2 * intermediate if has_gate else intermediate
    needed = {
        up_name: (experts, hidden, width) if is_transposed else (experts, width, hidden),
        "down_proj": (experts, *sizes),
        f"{up_name}_bias": (experts, width),
        "down_proj_bias": (experts, hidden),
    }
    for name, shape in needed.items():
        tensor = tensors[name]
        found = shapes.get(name) or (None if tensor is None else tuple(tensor.shape))
        if found is not None and found != shape:
            raise LayoutError(
                f"{name} does not fit the declared layout",
                found=f"{name} {found}, down_proj {shapes['down_proj']}, is_transposed={is_transposed}",
                needed=f"{name} {shape} (E={experts}, H={hidden}, I={intermediate})",
                hint="is_transposed=True means y = x @ W, False y = x @ W.T",
            )
    if min(experts, hidden, intermediate) < 1:
        raise LayoutError(
            "an axis is empty",
            found=f"E={experts}, H={hidden}, I={intermediate}",
            needed="all >= 1",
            hint="check the slice that made these tensors",
        )
    if quantization is not None:
        check_grids(tensors, quantization, has_gate, is_transposed)
    return experts, hidden, intermediate


def _check_dtypes(tensors: dict[str, Tensor | None]) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if tensor.dtype not in _FLOATS:
            raise UnsupportedScheme(
                f"{name} is not a floating-point weight",
                found=str(tensor.dtype),
                needed="float64, float32, bfloat16 or float16",
                hint="quantization=Quantization(fmt) and scales say what quantized weights mean",
            )
    down = given["down_proj"]
    for name, tensor in given.items():
        if tensor.dtype != down.dtype:
            raise DtypeError(
                "the weights have different dtypes",
                found=f"{name} {tensor.dtype}, down_proj {down.dtype}",
                needed="one dtype for all",
                hint=f"{name}.to({down.dtype})",
            )
        if tensor.device != down.device:
            raise DeviceError(
                "the weights are on different devices",
                found=f"{name} on {tensor.device}, down_proj on {down.device}",
                needed="one device for all",
                hint=f'{name}.to("{down.device}")',
            )
