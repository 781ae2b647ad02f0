"""The steps around a grouped product over padded rows: gather, gate, weighted sum; with or without a cast to e4m3.

T tokens, K slots, S = T*K pairs, R padded rows, E experts, H hidden and I intermediate size, C columns. On CUDA each
step is one launch of ours (kernels/padded.py); anywhere else torch ops do the same. Rows of padding hold whatever
memory held: nobody reads them, and no sum takes them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from routed_experts.gates import apply_gate
from routed_experts.layout import ExpertLayout

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights

E4M3_MAX = 448.0
LEAST_AMAX = 1e-4  # DeepGEMM's floor


class Cast(NamedTuple):
    """How rows are quantized: columns that share a scale, and whether scales are packed powers of two."""

    group: int
    packed: bool


class Rows(NamedTuple):
    """Padded rows (R, C), and with a cast their scales (R, groups), column by column, 16 bytes aligned."""

    values: Tensor
    scales: Tensor | None

    def operand(self) -> Any:
        """Return what a product takes: the rows, or the pair of rows and scales."""
        return self.values if self.scales is None else (self.values, self.scales)


def gather(x_TH: Tensor, layout: ExpertLayout, slots: int, cast: Cast | None) -> tuple[Rows, Tensor]:
    """Return the padded rows of a call's tokens, and (S,) int32, the padded row of each pair that has an expert."""
    if x_TH.is_cuda:
        from routed_experts.padded_launches import gather as launched

        return launched(x_TH, layout, slots, cast)
    position, source = _positions(layout)
    rows = make_rows(source.shape[0], x_TH.shape[1], x_TH, cast)
    owned = source >= 0
    fill(rows, x_TH[source[owned] // slots].float(), owned, cast)
    return rows, position


def gate(u_RN: Tensor, experts: ExpertWeights, layout: ExpertLayout, cast: Cast | None) -> Rows:
    """Add the first bias to the first products (R, N), gate them, and return the second product's rows (R, I)."""
    if u_RN.is_cuda:
        from routed_experts.padded_launches import gate as launched

        return launched(u_RN, experts, layout, cast)
    assert layout.row_expert is not None
    owned = layout.row_expert >= 0
    value = u_RN[owned].float()
    if experts.up_bias is not None:
        value = value + experts.up_bias[layout.row_expert[owned].long()].float()
    value = apply_gate(experts, value if has_known_gate(experts) else value.to(u_RN.dtype)).float()
    rows = make_rows(u_RN.shape[0], experts.intermediate_size, u_RN, cast)
    fill(rows, value, owned, cast)
    return rows


def weigh(rows_RH: Tensor, position: Tensor, experts: ExpertWeights, ids: Tensor, weights: Tensor) -> Tensor:
    """Add the second bias, weight the rows and sum over slots in float32, in slot order: (T, H)."""
    if rows_RH.is_cuda:
        from routed_experts.padded_launches import weigh as launched

        return launched(rows_RH, position, experts, ids, weights)
    expert_TK = ids.long()
    real = (expert_TK >= 0) & (expert_TK < experts.num_experts)
    total = rows_RH.new_zeros(ids.shape[0], rows_RH.shape[1], dtype=torch.float32)
    place = position.view(ids.shape).long().masked_fill(~real, 0)
    for slot in range(ids.shape[1]):
        value = rows_RH[place[:, slot]].float()
        if experts.down_proj_bias is not None:
            value = value + experts.down_proj_bias[expert_TK[:, slot].masked_fill(~real[:, slot], 0)].float()
        value = value * weights[:, slot, None].float()
        total += value.masked_fill(~real[:, slot, None], 0)
    return total.to(rows_RH.dtype)


def has_known_gate(experts: ExpertWeights) -> bool:
    """Whether the gate is one of ours, which kernels have too."""
    return experts.gate is None and experts.activation_name is not None


def make_rows(rows: int, columns: int, like: Tensor, cast: Cast | None) -> Rows:
    """Return memory for rows and their scales, unwritten."""
    if cast is None:
        return Rows(like.new_empty(rows, columns), None)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=like.device)
    groups = -(-columns // cast.group)
    held, dtype = (-(-groups // 4), torch.int32) if cast.packed else (groups, torch.float32)
    return Rows(values, torch.empty(held, -(-rows // 4) * 4, dtype=dtype, device=like.device).t()[:rows])


def fill(rows: Rows, value: Tensor, owned: Tensor, cast: Cast | None) -> None:
    """Write float32 ``value`` (owned rows, C) into the rows that are owned."""
    if cast is None:
        rows.values[owned] = value.to(rows.values.dtype)
        return
    assert rows.scales is not None
    quantized, scale = cast_rows(value, cast)
    rows.values.view(torch.uint8)[owned] = quantized.view(torch.uint8)
    rows.scales[owned] = pack_exponents(scale) if cast.packed else scale


def cast_rows(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows (M, C): e4m3 (M, C), and float32 scales (M, groups), powers of two if they are packed."""
    rows, columns = x.shape
    groups = -(-columns // cast.group)
    parts = F.pad(x, (0, groups * cast.group - columns)).view(rows, groups, cast.group)
    scale = parts.abs().amax(-1).clamp(min=LEAST_AMAX) / E4M3_MAX
    if cast.packed:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quantized = (parts / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized.view(torch.uint8).view(rows, -1)[:, :columns].contiguous().view(torch.float8_e4m3fn), scale


def pack_exponents(scale: Tensor) -> Tensor:
    """Pack float32 powers of two (..., groups) into int32 (..., ceil(groups / 4)), the first in the lowest byte."""
    exponent = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    exponent = F.pad(exponent, (0, -exponent.shape[-1] % 4), value=127)
    return exponent.contiguous().view(torch.int32)


def _positions(layout: ExpertLayout) -> tuple[Tensor, Tensor]:
    """(S,) padded row of each pair, 0 for a sentinel; and (R,) pair of each padded row, -1 on padding."""
    assert layout.row_expert is not None
    assert layout.starts is not None
    expert = layout.row_expert.long()
    owned = expert >= 0
    row = torch.arange(expert.shape[0], device=expert.device)
    first = (layout.offsets - layout.counts).long() - layout.starts[:-1].long()
    source = torch.full_like(expert, -1)
    source[owned] = layout.order[(row + first[expert])[owned]].long()
    position = torch.zeros_like(layout.order)
    position[source[owned]] = row[owned].to(torch.int32)
    return position, source
