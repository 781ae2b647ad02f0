"""Tensor descriptors of weights and rows: what may be fetched by TMA, and how it is described."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor

from routed_experts.weights import ExpertWeights

_ALIGNMENT = 16  # bytes, of the address and of every stride but the last


def can_describe(experts: ExpertWeights) -> bool:
    """Whether descriptors can stand for both projections, and Triton has them (3.4 and newer)."""
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return False
    halves_apart = experts.is_transposed and experts.has_gate and experts.is_concatenated
    sizes = (experts.hidden_size, experts.intermediate_size)
    rows_aligned = all(size * experts.dtype.itemsize % _ALIGNMENT == 0 for size in sizes)
    matrices = (experts.up_weight, experts.down_weight)
    return rows_aligned and not halves_apart and all(_describable(matrix) for matrix in matrices)


def _describable(tensor: Tensor) -> bool:
    """Whether a descriptor can stand for the tensor: contiguous along its last dimension, all else aligned."""
    *strides, last = tensor.stride()
    item = tensor.element_size()
    aligned = all(stride * item % _ALIGNMENT == 0 for stride in strides)
    return last == 1 and aligned and tensor.data_ptr() % _ALIGNMENT == 0


def described(rows: Tensor) -> Tensor:
    """Rows (S, D) as a descriptor needs them, D being aligned: contiguous and aligned, copied where they are not."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def up_descriptor(experts: ExpertWeights, gate: str, columns: int, depth: int) -> Any:
    """Descriptor of the first projection; a block is ``depth`` by ``columns``, twice as many with a gate."""
    weight = experts.up_weight
    if gate == "halves":
        expert, row, _ = weight.stride()
        inner = experts.intermediate_size
        shape = (weight.shape[0], 2, inner, experts.hidden_size)
        halves = weight.as_strided(shape, (expert, inner * row, row, 1))
        return _describe(halves, [1, 2, columns, depth])
    width = 2 * columns if gate == "pairs" else columns
    return matrix_descriptor(weight, experts.is_transposed, width, depth)


def rows_descriptor(rows: Tensor, height: int, depth: int) -> Any:
    """Descriptor of rows (S, D)."""
    return _describe(rows, [height, depth])


def matrix_descriptor(weight: Tensor, is_transposed: bool, columns: int, depth: int) -> Any:
    """Descriptor of matrices (E, columns, depth), or (E, depth, columns) transposed."""
    return _describe(weight, [1, depth, columns] if is_transposed else [1, columns, depth])


def _describe(tensor: Tensor, block: list[int]) -> Any:
    # Since Triton 3.4.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
