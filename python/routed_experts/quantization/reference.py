"""quantize and dequantize: the definition that every kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from routed_experts.errors import DtypeError, LayoutError
from routed_experts.quantization.codes import from_e2m1, round_scale_up, scale_values, to_e2m1, to_e4m3, to_ue8m0
from routed_experts.quantization.formats import E2M1_MAX, E4M3, E4M3_MAX, MX_GROUP, Quantization, refuse_format

# The smallest scale: what is below float32's normal numbers some devices take for 0.
SMALLEST_SCALE = 2.0**-126
_FP4_DTYPES = (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.int8))


def quantize(
    weight: Tensor,
    fmt: str,
    *,
    block: tuple[int, int] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a (..., N, K) weight; return it as it is stored, and its inverse scales.

    The scale of a block is its largest magnitude over 448 (FP4: over 6), rounded up to a power of two for UE8M0 and
    for FP4, at least 2**-126, and 1 for a block of zeros. The last blocks may be short.

    Args:
        weight: (..., N, K), any floating dtype.
        fmt: a format of :class:`Quantization`; ``block`` and ``scale_dtype`` as there.

    Returns:
        ``fp8_block`` float8_e4m3fn (..., N, K) and (..., ceil(N/bn), ceil(K/bk)); ``mxfp8`` the same weight and
        (..., N, K/32); ``fp8_tensor`` and (..., 1, 1); ``mxfp4`` int8 (..., N, K/2) and (..., N, K/32).

    Raises:
        LayoutError: K that does not divide by 32 (MX), a weight that is not finite, what Quantization refuses.
        DtypeError: a weight that is not floating.
    """
    scheme = Quantization(fmt, block, scale_dtype=scale_dtype)
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise DtypeError(
            "only floating weights can be quantized",
            found=str(weight.dtype),
            needed="float64, float32, bfloat16 or float16",
            hint="dequantize first to change the format",
        )
    if weight.dim() < 2:
        raise LayoutError(
            "a weight is a matrix or a stack of them",
            found=str(tuple(weight.shape)),
            needed="(..., N, K)",
            hint="weight[None] makes a row a matrix",
        )
    rows, columns = weight.shape[-2:]
    scheme.scale_shape(1, rows, columns)  # refuses columns that do not fit
    value = weight.detach().to(torch.float32)
    height, width = scheme.block or (rows, columns)
    scale = _scales(_largest(value, height, width), scheme)
    quotient = value / _spread(scale, height, width, rows, columns)
    stored = to_e2m1(quotient) if scheme.is_fp4 else to_e4m3(quotient)
    return stored, scale if scheme.scale_dtype == torch.float32 else to_ue8m0(scale)


def dequantize(
    weight: Tensor,
    scale_inv: Tensor,
    *,
    block: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return stored values times their scales, (..., N, K) in ``dtype``; computed in float32.

    Args:
        weight: float8_e4m3fn (..., N, K), or packed FP4 (int8, uint8, float4_e2m1fn_x2) (..., N, K/2).
        scale_inv: float32, float8_e8m0fnu or its bytes as uint8.
        block: rows and columns that share a scale, the last ones short where they do not divide: never taken from
            the shape of the scales. None for a scale over 32 columns (FP4, MXFP8), and for one a matrix: () or
            (..., 1, 1), or (..., 2, 1) for gate and up.
        dtype: of the result.

    Raises:
        LayoutError: scales that do not fit the weight.
        DtypeError: scales of another dtype.
        UnsupportedScheme: a weight that no format stores.
    """
    packed = weight.dtype in _FP4_DTYPES
    if not packed and weight.dtype != E4M3:
        raise refuse_format(str(weight.dtype), "float8_e4m3fn, or int8 for FP4")
    if scale_inv.dtype not in (torch.float32, torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)):
        raise DtypeError(
            "scales are not stored in this dtype",
            found=str(scale_inv.dtype),
            needed="float32, float8_e8m0fnu or uint8",
            hint="scale.float() keeps its value",
        )
    value = from_e2m1(weight.view(torch.uint8)) if packed else weight.to(torch.float32)
    rows, columns = value.shape[-2:]
    scale = scale_values(scale_inv)
    if packed:
        height, width = 1, MX_GROUP
    elif block is not None:
        height, width = block
        if rows % 2 == 0 and rows <= height and scale.dim() > 1 and scale.shape[-2] == 2:
            height = rows // 2  # gate and up, each shorter than a block
    else:
        scale, height, width = _without_block(scale, tuple(value.shape))
    needed = (*value.shape[:-2], -(-rows // height), -(-columns // width))
    if tuple(scale.shape) != needed:
        raise _misfit(tuple(scale_inv.shape), needed, block)
    return multiply_blocks(value, scale, height, width).to(dtype)


def multiply_blocks(value: Tensor, scale: Tensor, height: int, width: int) -> Tensor:
    """Multiply (..., N, K) in place by the scale of each element's block; return it."""
    rows, columns = value.shape[-2:]
    by_row = scale if height == 1 else scale.repeat_interleave(height, dim=-2)[..., :rows, :]
    whole = columns // width
    if whole:
        main = value[..., : whole * width].unflatten(-1, (whole, width))
        main.mul_(by_row[..., :whole, None])
    if whole * width < columns:
        value[..., whole * width :].mul_(by_row[..., whole:])
    return value


def _without_block(scale: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int, int]:
    """Scales of a whole matrix, of gate and up, or of 32 columns: (..., rows, columns) with what a scale spans."""
    *stack, rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(*stack, 1, 1), rows, columns
    if tuple(scale.shape) in (tuple(stack), (*stack, 1)):
        return scale.reshape(*stack, 1, 1), rows, columns
    if tuple(scale.shape) == (*stack, 1, 1):
        return scale, rows, columns
    if columns % MX_GROUP == 0 and tuple(scale.shape) == (*stack, rows, columns // MX_GROUP):
        return scale, 1, MX_GROUP
    if rows % 2 == 0 and tuple(scale.shape) == (*stack, 2, 1):
        return scale, rows // 2, columns
    one = (*stack, 1, 1)
    raise _misfit(tuple(scale.shape), one, None)


def _misfit(found: tuple[int, ...], needed: tuple[int, ...], block: tuple[int, int] | None) -> LayoutError:
    return LayoutError(
        "the scales do not fit the weight",
        found=f"scales {found}, block={block}",
        needed=f"{needed}" if block is not None else f"{needed}, or a scale over {MX_GROUP} columns",
        hint="pass the block that the checkpoint names as weight_block_size; it is never guessed",
    )


def _largest(value: Tensor, height: int, width: int) -> Tensor:
    """Largest magnitude of every block, (..., ceil(N/height), ceil(K/width)); zeros fill up the short ones."""
    rows, columns = value.shape[-2:]
    padded = torch.nn.functional.pad(value.abs(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    largest = blocks.amax(dim=(-3, -1))
    if not torch.isfinite(largest).all():
        raise LayoutError(
            "a weight that is not finite cannot be quantized",
            found="Inf or NaN",
            needed="finite values",
            hint="look for the layer's broken values with torch.isfinite(weight)",
        )
    return largest


def _scales(largest: Tensor, scheme: Quantization) -> Tensor:
    """The inverse scale of every block, float32."""
    scale = (largest / (E2M1_MAX if scheme.is_fp4 else E4M3_MAX)).clamp(min=SMALLEST_SCALE)
    if scheme.is_fp4 or scheme.scale_dtype != torch.float32:
        scale = round_scale_up(scale)
    return torch.where(largest == 0, 1.0, scale)


def _spread(scale: Tensor, height: int, width: int, rows: int, columns: int) -> Tensor:
    """The scale of every element, (..., N, K)."""
    by_row = scale.repeat_interleave(height, dim=-2)[..., :rows, :]
    return by_row.repeat_interleave(width, dim=-1)[..., :columns]
