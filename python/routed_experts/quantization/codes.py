"""Numbers of 8 and 4 bits: E8M0 scales, E4M3 and E2M1 values, exact in both directions.

Casts of torch are used where they are exact. Two are not: to float8_e8m0fnu they round to nearest, where a scale
that is too small overflows its block; and whether a cast to float8_e4m3fn saturates depends on the version.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from routed_experts.quantization.formats import E2M1_MAX, E4M3, E4M3_MAX, ue8m0

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two neighbours; a value on one goes to the smaller magnitude.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_scale_up(scale: Tensor) -> Tensor:
    """Round positive float32 up to powers of two, exponents kept within 2**-126 .. 2**127; float32."""
    bits = scale.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def to_ue8m0(power: Tensor) -> Tensor:
    """Store float32 powers of two, 2**-126 .. 2**127, as float8_e8m0fnu."""
    return (power.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(ue8m0())


def is_power_of_two(scale: Tensor) -> Tensor:
    """Tell which float32 values float8_e8m0fnu can hold: the dtype float32 alone says nothing."""
    bits = scale.contiguous().view(torch.int32)
    return (bits > 0) & (bits < 0x7F800000) & (((bits & 0x7FFFFF) == 0) | (bits == 0x400000))


def scale_values(scale: Tensor) -> Tensor:
    """Return scales as float32, exactly; bytes are those of float8_e8m0fnu, 0 being 2**-127 and 255 NaN."""
    scale = scale.view(ue8m0()) if scale.dtype == torch.uint8 else scale
    return scale.to(torch.float32)


def to_e4m3(value: Tensor) -> Tensor:
    """Round to E4M3, saturating."""
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def to_e2m1(value: Tensor) -> Tensor:
    """Round (..., K) to E2M1, saturating, two codes a byte: int8 (..., K/2), element 2i in the low bits; never -0."""
    bounds = torch.tensor(_E2M1_BOUNDS, device=value.device)
    code = torch.bucketize(value.abs().clamp(max=E2M1_MAX), bounds).to(torch.uint8)
    code |= ((value < 0) & (code > 0)).to(torch.uint8) << 3
    return (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)


def from_e2m1(packed: Tensor) -> Tensor:
    """Return the values (..., K) of packed codes (..., K/2), float32."""
    index = packed.contiguous().view(torch.uint8).to(torch.int32)
    pairs = _pair_table(packed.device).index_select(0, index.reshape(-1))
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=64)
def _pair_table(device: torch.device) -> Tensor:
    """Both values of every byte, (256, 2)."""
    with torch.inference_mode(False):
        values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
        byte = torch.arange(256)
        return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)
