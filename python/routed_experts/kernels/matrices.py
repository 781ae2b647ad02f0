"""The matrices of experts as kernels read them: unquantized, or in 8 or 4 bits with their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from routed_experts.kernels.constants import weight_strides
from routed_experts.weights import ExpertWeights

# How an odd and an even column with a scale each are told; see kernels/decode.py.
ALTERNATING = 0
_NOT_QUANTIZED = {"FORMAT": None, "S_E": 0, "S_N": 0, "S_D": 0, "Q_N": 1, "Q_D": 1}


class Matrix(NamedTuple):
    """One projection of all experts: (E, N, D), or (E, D, N) transposed; its first three are arguments of kernels.

    ``scale`` has an element for ``rows`` of N by ``columns`` of D, in the order of the weight's dimensions; None
    where weights are not quantized. Of ``format`` e2m1, D is twice what is stored; e2m1_columns is the same read
    transposed, with two of N a byte.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    is_transposed: bool
    format: str | None = None
    rows: int = 1
    columns: int = 1

    def turned(self) -> Matrix:
        """The same for products with its transpose, without the bias."""
        formats = {"e2m1": "e2m1_columns", "e2m1_columns": "e2m1"}
        return self._replace(
            bias=None,
            is_transposed=not self.is_transposed,
            format=formats.get(str(self.format), self.format),
            rows=self.columns,
            columns=self.rows,
        )

    def constants(self) -> dict[str, Any]:
        """Strides and format; see kernels/quantized_product.py."""
        strides = weight_strides(self.weight, self.bias, self.is_transposed)
        if self.scale is None:
            return strides | _NOT_QUANTIZED
        expert, column, depth = (self.scale.mT if self.is_transposed else self.scale).stride()
        scales = {"S_E": expert, "S_N": column, "S_D": depth, "Q_N": self.rows, "Q_D": self.columns}
        return {**strides, **scales, "FORMAT": self.format}


def up_matrix(experts: ExpertWeights, *, reads_e4m3: bool = True) -> Matrix:
    """The first projection; ``reads_e4m3`` says whether the device has instructions for such numbers."""
    scale = None if experts.quantization is None else experts.up_scale
    parts, inner = 1 + experts.has_gate, experts.intermediate_size
    shape = (parts * inner, experts.hidden_size)
    matrix = _matrix(experts, experts.up_weight, experts.up_bias, scale, shape, reads_e4m3)
    if scale is None or parts == 1:
        return matrix
    if experts.is_concatenated:
        return matrix._replace(rows=min(matrix.rows, inner))
    return matrix._replace(rows=ALTERNATING) if matrix.rows == parts * inner else matrix


def down_matrix(experts: ExpertWeights, *, reads_e4m3: bool = True) -> Matrix:
    """The second projection."""
    scale = None if experts.quantization is None else experts.down_scale
    shape = (experts.hidden_size, experts.intermediate_size)
    return _matrix(experts, experts.down_weight, experts.down_proj_bias, scale, shape, reads_e4m3)


def _matrix(
    experts: ExpertWeights,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shape: tuple[int, int],
    reads_e4m3: bool,
) -> Matrix:
    quantization = experts.quantization
    if quantization is None or scale is None:
        return Matrix(weight, None, bias, experts.is_transposed)
    rows, columns = quantization.block or shape
    if quantization.is_fp4:
        name, weight = "e2m1", weight.view(torch.uint8)
    else:
        name, weight = "e4m3", weight if reads_e4m3 else weight.view(torch.uint8)
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    return Matrix(weight, scale, bias, experts.is_transposed, name, rows, columns)
