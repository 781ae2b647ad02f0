"""Quantized experts of one layer: as they are stored, or as bfloat16; one matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from routed_experts.checkpoint.files import TensorFiles
from routed_experts.checkpoint.names import ACTIVATION_SCALE, SCALE, Stack
from routed_experts.checkpoint.plan import Parameter
from routed_experts.checkpoint.scales import Weight, check_blocks, plan_activation_scale, plan_scale, read_scale
from routed_experts.checkpoint.scheme import Scheme
from routed_experts.quantization import Quantization, dequantize


@dataclass(frozen=True)
class QuantizedPlan:
    """Everything that headers say of a layer's quantized experts, and fits."""

    scheme: Scheme
    weights: dict[str, Weight]
    scales: dict[str, Parameter]


def plan_quantized(
    stack: Stack,
    scheme: Scheme,
    parameters: dict[str, Parameter],
    stored: dict[str, Parameter],
    flags: dict[str, Any],
    *,
    as_floats: bool,
    local: range,
) -> QuantizedPlan:
    """Lay the ``stored`` scales over the ``parameters``; CheckpointError names the first that does not fit."""
    weights, scales = {}, {}
    for role, parameter in parameters.items():
        if role.endswith("_bias"):
            continue
        weight = weights[role] = _weight(role, parameter, stack, scheme, flags)
        check_blocks(role, weight, scheme, as_floats)
        scale = stored[role + SCALE]
        scales[role + SCALE] = plan_scale(scale, scale.name(local.start), weight, scheme)
    for role, scale in stored.items():
        if role.endswith(ACTIVATION_SCALE):
            scales[role] = plan_activation_scale(scale, scale.name(local.start), parameters["down_proj"].shape[0])
    return QuantizedPlan(scheme, weights, scales)


def _weight(role: str, parameter: Parameter, stack: Stack, scheme: Scheme, flags: dict[str, Any]) -> Weight:
    shape = logical_shape(role, parameter, scheme)
    rows, columns = reversed(shape[1:]) if flags["is_transposed"] else shape[1:]
    return Weight(
        count=shape[0],
        rows=rows,
        columns=columns,
        halves=2 if role == "gate_up_proj" else 1,
        is_transposed=flags["is_transposed"],
        is_concatenated=flags["is_concatenated"],
        is_merged=bool(stack.matrices),
    )


def logical_shape(role: str, parameter: Parameter, scheme: Scheme | None) -> tuple[int, ...]:
    """Shape in values: two of FP4 share a byte along the last axis."""
    packed = scheme is not None and scheme.is_fp4 and parameter.shape and not role.endswith("_bias")
    return (*parameter.shape[:-1], 2 * parameter.shape[-1]) if packed else parameter.shape


def read_scales(planned: QuantizedPlan, files: TensorFiles, count: int, local: range) -> dict[str, torch.Tensor]:
    """All scales of the local experts, checked value by value, on the CPU."""
    return {role: read_scale(parameter, files, count, local) for role, parameter in planned.scales.items()}


def quantization_of(planned: QuantizedPlan) -> Quantization:
    """The format of the weights in memory."""
    return planned.scheme.quantization(planned.scales["down_proj" + SCALE].dtype)


def read_dequantized(
    role: str,
    parameter: Parameter,
    scale: torch.Tensor,
    planned: QuantizedPlan,
    files: TensorFiles,
    local: range,
    device: torch.device | None,
) -> torch.Tensor:
    """One parameter as bfloat16; beside the result there is one expert in float32, whatever their number."""
    weight = planned.weights[role]
    shape = logical_shape(role, parameter, planned.scheme)[1:]
    target = torch.empty((len(local), *shape), dtype=torch.bfloat16, device=device)
    for slot, expert in enumerate(local):
        stored, rows = _matrices(parameter, expert, files), target[slot]
        if weight.is_transposed:
            stored, rows = [stored[0].mT], rows.mT
        grid = scale[slot].mT if weight.is_transposed and planned.scheme.block else scale[slot]
        if len(stored) == 1:
            stored = _halves(stored[0], weight)
        for values, scales, place in zip(stored, _halves(grid, weight), _halves(rows, weight), strict=True):
            place.copy_(dequantize(values, scales, block=planned.scheme.block, dtype=torch.bfloat16))
    return target


def _matrices(parameter: Parameter, expert: int, files: TensorFiles) -> list[torch.Tensor]:
    if parameter.stacked is None:
        return [files.read(name) for name in parameter.matrices[expert]]
    return [files.read(parameter.stacked, expert, expert + 1)[0]]


def _halves(rows: torch.Tensor, weight: Weight) -> list[torch.Tensor]:
    """Gate and up apart; scales have rows for both, too."""
    if weight.halves == 1:
        return [rows]
    return list(rows.chunk(2)) if weight.is_concatenated else [rows[0::2], rows[1::2]]


def in_memory(parameter: Parameter) -> Parameter:
    """The parameter with the dtype that its tensor has once read: packed pairs are plain bytes."""
    return replace(parameter, dtype=torch.int8) if parameter.dtype == torch.float4_e2m1fn_x2 else parameter
