"""What kernels do to activations on the way in: quantized per row and group, or by one stored scale."""

from __future__ import annotations

import torch
from torch import Tensor

from routed_experts.errors import DtypeError, LayoutError
from routed_experts.quantization.codes import round_scale_up, scale_values, to_e4m3, to_ue8m0
from routed_experts.quantization.formats import E4M3_MAX, ue8m0
from routed_experts.quantization.reference import SMALLEST_SCALE


def quantize_activations(
    x: Tensor, group: int = 128, *, scale_dtype: torch.dtype = torch.float32, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantize (rows, K) to E4M3 with a scale for every row and every ``group`` columns.

    Args:
        x: (rows, K), any floating dtype.
        group: columns that share a scale, 128, or 32 beside MX weights; the last group may be short.
        scale_dtype: float32, or float8_e8m0fnu for scales that are rounded up to powers of two.
        floor: magnitudes below it count as it (1e-4 in DeepGEMM).

    Returns:
        float8_e4m3fn (rows, K) and scales (rows, ceil(K/group)), 1 for a group of zeros without a floor.

    Raises:
        DtypeError: another scale_dtype.
        LayoutError: a group below 1.
    """
    if scale_dtype != torch.float32 and scale_dtype != ue8m0():
        raise DtypeError(
            "scales are not stored in this dtype",
            found=repr(scale_dtype),
            needed="torch.float32 or torch.float8_e8m0fnu",
            hint="leave scale_dtype out for float32",
        )
    if group < 1:
        raise LayoutError("a group is empty", found=f"group={group}", needed="at least 1", hint="128, or 32 for MX")
    value = x.detach().to(torch.float32)
    columns = value.shape[-1]
    padded = torch.nn.functional.pad(value.abs(), (0, -columns % group))
    largest = padded.unflatten(-1, (-1, group)).amax(-1).clamp(min=floor)
    scale = (largest / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    scale = torch.where(largest == 0, 1.0, scale if scale_dtype == torch.float32 else round_scale_up(scale))
    quantized = to_e4m3(value / scale.repeat_interleave(group, dim=-1)[..., :columns])
    return quantized, scale if scale_dtype == torch.float32 else to_ue8m0(scale)


def quantize_activations_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize (rows, K) to E4M3 by a stored scale, a number for all or (rows, 1); saturates."""
    return to_e4m3(x.detach().to(torch.float32) / scale_values(scale))
