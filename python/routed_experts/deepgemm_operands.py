"""Expert weights as DeepGEMM's grouped products take them, and how the rows beside them are quantized.

E experts, N rows and K columns of a weight, G groups of columns that share a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from routed_experts.padded_steps import Cast, pack_exponents
from routed_experts.reshaped import notes_of
from routed_experts.weights import ExpertWeights

BLACKWELL = 10


class Scheme(NamedTuple):
    """What the formats of the weights and the device decide together."""

    cast: Cast | None  # of the rows; None: they stay bfloat16
    recipe: tuple[int, int, int] | None
    psum: bool  # groups are given as running sums, not row by row


def scheme_of(experts: ExpertWeights, major: int) -> Scheme:
    """Return how rows are quantized and groups are given on a device of capability ``major``."""
    psum = major >= BLACKWELL
    quantization: Any = experts.quantization
    if quantization is None:
        return Scheme(None, None, psum)
    if not psum:
        return Scheme(Cast(128, packed=False), None, psum)
    group = 32 if quantization.is_fp4 else 128
    return Scheme(Cast(group, packed=True), (1, 1, group), psum)


def weight_operand(weight: Tensor, scale: Tensor | None, scheme: Scheme) -> Any:
    """Return (E, N, K) as it is, or beside its scales.

    Scales are float32 (E, ceil(N/128), ceil(K/128)), contiguous, for float32 rows; else int32 (E, N, ceil(G/4)), four
    exponents each, column by column with columns 16 bytes aligned.
    """
    if scheme.cast is None or scale is None:
        return weight
    if not scheme.cast.packed:
        return weight, scale.float().contiguous()
    return weight, _packed(scale, weight.shape[1])


def _packed(scale: Tensor, rows: int) -> Tensor:
    """Pack UE8M0 scales once for the memory that holds them; again after it was written to."""
    version = 0 if scale.is_inference() else scale._version
    notes, key = notes_of(scale), ("packed scales", scale.data_ptr(), tuple(scale.shape), rows)
    kept = notes.get(key)
    if kept is None or kept[0] != version:
        kept = notes[key] = (version, pack_weight_scales(scale, rows))
    packed: Tensor = kept[1]
    return packed


def pack_weight_scales(scale: Tensor, rows: int) -> Tensor:
    """Return UE8M0 scales (E, ceil(N/bn), G) as int32 (E, N, ceil(G/4)), a block's scale repeated for each row."""
    height = -(-rows // scale.shape[1])
    per_row = scale.float().repeat_interleave(height, dim=1)[:, :rows]
    packed = pack_exponents(per_row)
    experts, _, words = packed.shape
    aligned = packed.new_empty(experts, words, -(-rows // 4) * 4).transpose(1, 2)[:, :rows]
    return aligned.copy_(packed)
