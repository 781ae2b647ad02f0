"""The matrices of experts as kernels read them: unquantized, or in 8 or 4 bits with their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from routed_experts.kernels.constants import weight_strides
from routed_experts.quantization.stacks import Stack, stack_of
from routed_experts.weights import ExpertWeights

# The block of rows of which even and odd ones have a scale each; see kernels/decode.py.
_ALTERNATING = 0
_NOT_QUANTIZED = {"FORMAT": None, "S_E": 0, "S_N": 0, "S_D": 0, "Q_N": 1, "Q_D": 1}
_OTHER_WAY = {"e2m1": "e2m1_columns", "e2m1_columns": "e2m1"}


class Matrix(NamedTuple):
    """One projection of all experts: (E, N, D), or (E, D, N) transposed; its first three are arguments of kernels.

    ``scale`` has an element for ``block`` of N by D, at ``strides`` of expert, N and D; None where weights are not
    quantized. Of ``format`` e2m1, D is twice what is stored; e2m1_columns is the same read transposed, with two of N a
    byte.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    is_transposed: bool
    strides: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int] = (1, 1)
    format: str | None = None

    def turned(self) -> Matrix:
        """The same for products with its transpose, without the bias."""
        expert, rows, columns = self.strides
        return self._replace(
            bias=None,
            is_transposed=not self.is_transposed,
            strides=(expert, columns, rows),
            block=self.block[::-1],
            format=None if self.format is None else _OTHER_WAY.get(self.format, self.format),
        )

    def constants(self) -> dict[str, Any]:
        """Strides and format; see kernels/quantized_product.py."""
        weights = weight_strides(self.weight, self.bias, self.is_transposed)
        if self.scale is None:
            return weights | _NOT_QUANTIZED
        scales = dict(zip(("S_E", "S_N", "S_D"), self.strides, strict=True))
        return {**weights, **scales, "Q_N": self.block[0], "Q_D": self.block[1], "FORMAT": self.format}


def up_matrix(experts: ExpertWeights, *, reads_e4m3: bool = True) -> Matrix:
    """The first projection; ``reads_e4m3`` says whether the device has instructions for such numbers."""
    if experts.quantization is None:
        return Matrix(experts.up_weight, None, experts.up_bias, experts.is_transposed)
    return matrix_of(stack_of(experts, True), experts.up_bias, experts.is_transposed, reads_e4m3=reads_e4m3)


def down_matrix(experts: ExpertWeights, *, reads_e4m3: bool = True) -> Matrix:
    """The second projection."""
    bias = experts.down_proj_bias
    if experts.quantization is None:
        return Matrix(experts.down_weight, None, bias, experts.is_transposed)
    return matrix_of(stack_of(experts, False), bias, experts.is_transposed, reads_e4m3=reads_e4m3)


def matrix_of(stack: Stack, bias: Tensor | None, is_transposed: bool, *, reads_e4m3: bool) -> Matrix:
    """Quantized matrices (E, A, B) for rows of B, or of A if they are to be read transposed."""
    weight, scale, block = stack.weight, stack.scale, stack.block
    if scale.dtype != torch.float32:
        scale = scale.view(torch.uint8)
    if weight.dtype == torch.int8 or not reads_e4m3:
        weight = weight.view(torch.uint8)
    expert, rows, columns = stack.scale.stride()
    if _is_turned(stack):
        rows, columns = columns, rows
    if stack.interleaved:
        block = (_ALTERNATING, block[1]) if block[0] == 1 else (block[0], _ALTERNATING)
    name = "e2m1" if stack.weight.dtype == torch.int8 else "e4m3"
    matrix = Matrix(weight, scale, bias, False, (expert, rows, columns), block, name)
    return matrix.turned()._replace(bias=bias) if is_transposed else matrix


def _is_turned(stack: Stack) -> bool:
    """Whether the scales have the axes of the weight the other way round: one for each half, of transposed ones."""
    _, rows, columns = stack.shape
    if stack.interleaved:
        return stack.block[0] != 1
    return tuple(stack.scale.shape[1:]) != (-(-rows // stack.block[0]), -(-columns // stack.block[1]))
