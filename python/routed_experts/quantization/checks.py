"""What ExpertWeights refuses of quantized tensors, before anything is held: dtypes, grids, and values of scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts.errors import DeviceError, DtypeError, LayoutError, UnsupportedScales, UnsupportedScheme
from routed_experts.quantization.formats import Quantization, ue8m0

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Tensors = dict[str, "Tensor | None"]


def as_stored(tensors: Tensors, quantization: Any) -> Tensors:
    """Return the tensors, raw bytes seen as what they are: uint8 scales as E8M0, FP4 codes of any name as int8."""
    if not isinstance(quantization, Quantization):
        return tensors
    seen = dict(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if name.endswith("_scale_inv") and tensor.dtype == torch.uint8:
            seen[name] = tensor.view(ue8m0())
        elif quantization.is_fp4 and tensor.dtype in (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8)):
            seen[name] = tensor.view(torch.int8)
    return seen


def check_scheme(tensors: Tensors, quantization: Any, has_gate: bool, transposed: bool, concatenated: bool) -> None:
    """Check that scales, flags and the scheme go together; refuse scales without a scheme."""
    scales = [name for name, tensor in tensors.items() if _is_scale(name) and tensor is not None]
    if quantization is None:
        if scales:
            raise LayoutError(
                "scales without the scheme they belong to",
                found=", ".join(scales),
                needed="quantization=Quantization(fmt, block)",
                hint="the block is never guessed from the shape of the scales",
            )
        return
    if not isinstance(quantization, Quantization):
        raise DtypeError(
            "quantization is no scheme",
            found=f"{quantization!r} of type {type(quantization).__name__}",
            needed="Quantization or None",
            hint='Quantization("fp8_block", (128, 128))',
        )
    if quantization.is_fp4 and transposed:
        raise LayoutError(
            "FP4 pairs lie along the axis that a product sums over",
            found="mxfp4 with is_transposed=True",
            needed="weights (E, N, K/2)",
            hint="transpose before quantizing: quantize_experts takes is_transposed=False weights",
        )
    if has_gate and not concatenated and quantization.block is not None and quantization.block[0] > 1:
        raise LayoutError(
            "a block of interleaved rows would mix gate and up",
            found=f"is_concatenated=False with block={quantization.block}",
            needed="blocks of one row, or fp8_tensor",
            hint="mxfp8, mxfp4, or fp8_block with block=(1, 128)",
        )
    _check_presence(tensors, quantization, "gate_up_proj" if has_gate else "up_proj", set(scales))


def _check_presence(tensors: Tensors, quantization: Quantization, up: str, found: set[str]) -> None:
    needed = {f"{up}_scale_inv", "down_proj_scale_inv"}
    if quantization.activation_scheme == "static":
        needed |= {"gate_up_proj_activation_scale", "down_proj_activation_scale"}
    missing, extra = sorted(needed - found), sorted(found - needed)
    if missing or extra:
        words = [f"{name} is missing" for name in missing] + [f"{name} is not wanted" for name in extra]
        raise LayoutError(
            "the scales do not match the weights",
            found="; ".join(words),
            needed=", ".join(sorted(needed)),
            hint=f"activation_scheme={quantization.activation_scheme!r}: one scale tensor for each projection",
        )


def logical_shape(weight: Tensor, quantization: Quantization | None) -> tuple[int, ...]:
    """Return the shape of the values: FP4 stores two in a byte of the last axis."""
    shape = tuple(weight.shape)
    return (*shape[:-1], 2 * shape[-1]) if quantization is not None and quantization.is_fp4 else shape


def check_grids(tensors: Tensors, quantization: Quantization, has_gate: bool, transposed: bool) -> None:
    """Check the shapes of all scales against their weights, which are checked already."""
    for name, halves in (("gate_up_proj" if has_gate else "up_proj", has_gate), ("down_proj", False)):
        weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
        assert weight is not None  # check_declaration
        assert scale is not None  # check_scheme
        experts, *sizes = logical_shape(weight, quantization)
        rows, columns = reversed(sizes) if transposed else sizes
        needed: tuple[int, ...] = quantization.scale_shape(experts, rows, columns, halves)
        if transposed and quantization.block is not None:
            needed = (needed[0], needed[2], needed[1])
        if tuple(scale.shape) != needed:
            raise LayoutError(
                f"{name}_scale_inv does not fit {name}",
                found=f"{tuple(scale.shape)} for {name} {tuple(weight.shape)}",
                needed=f"{needed}: {quantization.fmt}, block={quantization.block}",
                hint="pass the block that the weights were quantized with; the last block may be short",
            )
        _check_activation_scale(tensors, name, experts)


def _check_activation_scale(tensors: Tensors, name: str, experts: int) -> None:
    name = f"{'down_proj' if name == 'down_proj' else 'gate_up_proj'}_activation_scale"
    scale = tensors[name]
    if scale is not None and tuple(scale.shape) != (experts,):
        raise LayoutError(
            f"{name} has the wrong shape",
            found=str(tuple(scale.shape)),
            needed=f"({experts},): one for every expert",
            hint="scale.reshape(E) if it has axes of 1",
        )


def check_stored(tensors: Tensors, quantization: Quantization) -> None:
    """Check dtypes and devices of quantized tensors."""
    down = tensors["down_proj"]
    assert down is not None  # check_declaration
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        wanted = _wanted(name, quantization)
        if tensor.dtype not in wanted:
            error = UnsupportedScheme if name.endswith("_proj") else DtypeError
            raise error(
                f"{name} is not stored as {quantization.fmt}",
                found=str(tensor.dtype),
                needed=" or ".join(map(str, wanted)),
                hint=_HINTS[_is_scale(name)],
            )
        if tensor.device != down.device:
            raise DeviceError(
                "the weights are on different devices",
                found=f"{name} on {tensor.device}, down_proj on {down.device}",
                needed="one device for all",
                hint=f'{name}.to("{down.device}")',
            )


_HINTS = {
    True: "Quantization(scale_dtype=...) says how scales are stored; they are never rounded in silence",
    False: "quantize_experts makes quantized experts of floating weights",
}


def _wanted(name: str, quantization: Quantization) -> tuple[torch.dtype, ...]:
    if name.endswith("_activation_scale"):
        return (torch.float32,)
    if name.endswith("_scale_inv"):
        assert quantization.scale_dtype is not None  # set when made
        return (quantization.scale_dtype,)
    return _FLOATS if name.endswith("_bias") else (quantization.weight_dtype,)


def check_scale_values(tensors: Tensors) -> None:
    """Refuse scales that are 0, negative, NaN or infinite, naming tensor and experts; waits for the device.

    Checked when weights are made and never at a call. What has no values (meta, a tracer's) is let through.
    """
    for name, scale in tensors.items():
        if scale is None or not _is_scale(name) or scale.is_meta or torch.compiler.is_compiling():
            continue
        by_expert = bad_scales(scale).reshape(scale.shape[0], -1).any(1)
        if by_expert.any():
            bad = by_expert.nonzero().flatten().tolist()
            first = scale[bad[0]].to(torch.float32).flatten()
            value = first[bad_scales(scale[bad[0]]).flatten()][0].item()
            raise UnsupportedScales(
                f"{name} holds a scale that is none",
                found=f"{value} in expert {', '.join(map(str, bad[:8]))}{', ...' if len(bad) > 8 else ''}",
                needed="positive finite scales; a block of zeros has scale 1",
                hint="a scale that is missing often loads as 0: look for it in the checkpoint",
            )


def bad_scales(scale: Tensor) -> Tensor:
    """Tell which scales are 0, negative, NaN or infinite. An E8M0 byte can only be NaN, 255."""
    if scale.dtype == torch.float32:
        return ~((scale > 0) & (scale < torch.inf))
    return scale.view(torch.uint8) == 255


def _is_scale(name: str) -> bool:
    return name.endswith(("_scale_inv", "_activation_scale"))
