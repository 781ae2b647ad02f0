"""The quantized matrices of a layer, dequantized an expert or a chunk of experts at a time, never as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from routed_experts.quantization.codes import from_e2m1, scale_values
from routed_experts.quantization.reference import multiply_blocks

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights


class Stack(NamedTuple):
    """One projection of all experts as it is stored: (E, A, B), with one scale for every block of values."""

    weight: Tensor  # e4m3 (E, A, B), or int8 (E, A, B/2)
    scale: Tensor  # (E, ceil(A/height), ceil(B/width)); of a whole matrix and gated (E, 2, 1), also transposed
    fmt: str
    block: tuple[int, int]  # (height, width) that share a scale, along the axes A and B
    interleaved: bool  # the two scales of gate and up take turns

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, A, B) of the values."""
        experts, rows, columns = self.weight.shape
        return experts, rows, 2 * columns if self.weight.dtype == torch.int8 else columns

    def values(self, expert: int | Tensor) -> Tensor:
        """Return the matrices of one expert or of a list of them, float32, newly made."""
        # Indexing by a tensor copies bytes, since not every device and version indexes E4M3.
        chosen = self.weight.view(torch.uint8)[expert].view(self.weight.dtype)
        value = from_e2m1(chosen) if self.weight.dtype == torch.int8 else chosen.to(torch.float32)
        return self.scaled(value, expert)

    def scaled(self, value: Tensor, expert: int | Tensor) -> Tensor:
        """Multiply values of these experts, (..., A, B), by their scales, in place."""
        scale = self.scale if self.scale.dtype == torch.float32 else self.scale.view(torch.uint8)
        return multiply_blocks(value, self._grid(scale_values(scale[expert])), *self.block)

    def _grid(self, scale: Tensor) -> Tensor:
        """Scales along the axes of the weight; those of interleaved halves written out for every row."""
        _, rows, columns = self.shape
        if not self.interleaved:
            return scale.mT if self._is_turned(scale) else scale
        if self.block[0] == 1:
            return scale.repeat(*[1] * (scale.dim() - 2), rows // 2, 1)
        return scale.mT.repeat(*[1] * (scale.dim() - 1), columns // 2)

    def _is_turned(self, scale: Tensor) -> bool:
        _, rows, columns = self.shape
        return tuple(scale.shape[-2:]) != (-(-rows // self.block[0]), -(-columns // self.block[1]))


def stack_of(experts: ExpertWeights, is_up: bool) -> Stack:
    """Return the first or the second projection of quantized experts."""
    scheme = experts.quantization
    weight, scale = (
        (experts.up_weight, experts.up_scale) if is_up else (experts.down_weight, experts.down_proj_scale_inv)
    )
    assert scheme is not None
    assert scale is not None  # checked when made
    halves = is_up and experts.has_gate
    width = experts.intermediate_size * (2 if halves else 1)
    rows, columns = (width, experts.hidden_size) if is_up else (experts.hidden_size, experts.intermediate_size)
    interleaved = halves and scheme.block is None and not experts.is_concatenated
    if interleaved:
        block = (1, columns)
    elif scheme.block is None:
        block = (rows // 2 if halves else rows, columns)
    else:
        block = (scheme.row_block(rows, halves), scheme.block[1])
    if experts.is_transposed:
        block = (block[1], block[0])
    return Stack(weight, scale, scheme.fmt, block, interleaved)
