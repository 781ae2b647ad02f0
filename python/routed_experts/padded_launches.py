"""The launches behind padded_steps.py, and the sizes of their blocks. Triton is imported with this file."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from routed_experts.gates import apply_gate
from routed_experts.kernels.constants import gate_constants
from routed_experts.kernels.launch import Launch, device_of, launch
from routed_experts.kernels.padded import gate_rows, gather_rows, weigh_rows
from routed_experts.layout import ExpertLayout
from routed_experts.padded_steps import Cast, Rows, has_known_gate, make_rows
from routed_experts.weights import ExpertWeights

_ROWS = 16
_COLUMNS = 512
_SUM_TOKENS, _SUM_COLUMNS = 4, 256


def gather(x_TH: Tensor, layout: ExpertLayout, slots: int, cast: Cast | None) -> tuple[Rows, Tensor]:
    """As ``padded_steps.gather``; rows of ``x_TH`` may be any distance apart."""
    assert layout.row_expert is not None
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    rows = make_rows(layout.row_expert.shape[0], x_TH.shape[1], x_TH, cast)
    position = torch.empty_like(layout.order)
    tables = (layout.order, layout.row_expert, layout.starts, layout.offsets, layout.counts)
    arguments = (x_TH, *tables, rows.values, _bytes(rows, cast), position, x_TH.stride(0), *_sizes(rows))
    _launch_rows(gather_rows, arguments, rows, cast, {"K": slots, "C": x_TH.shape[1]})
    return rows, position


def gate(u_RN: Tensor, experts: ExpertWeights, layout: ExpertLayout, cast: Cast | None) -> Rows:
    """As ``padded_steps.gate``; a gate of one's own runs as it is, and the cast after it."""
    bias = experts.up_bias
    constants = gate_constants(experts, False)
    if not has_known_gate(experts):
        assert layout.row_expert is not None
        if bias is not None:
            u_RN = u_RN + bias[layout.row_expert.clamp(min=0).long()].to(u_RN.dtype)
            bias = None
        # Rows of padding are old memory: a gate may be a function of all rows, but never reads another's.
        u_RN = apply_gate(experts, u_RN).contiguous()
        if cast is None:
            return Rows(u_RN, None)
        constants = {"GATE": "none", "ACTIVATION": "identity", "LIMIT": None, "ALPHA": None}
    rows = make_rows(u_RN.shape[0], experts.intermediate_size, u_RN, cast)
    bias = None if bias is None else bias.contiguous()
    arguments = (u_RN, bias, layout.row_expert, rows.values, _bytes(rows, cast), *_sizes(rows))
    _launch_rows(gate_rows, arguments, rows, cast, {"INNER": experts.intermediate_size, **constants})
    return rows


def weigh(rows_RH: Tensor, position: Tensor, experts: ExpertWeights, ids: Tensor, weights: Tensor) -> Tensor:
    """As ``padded_steps.weigh``."""
    tokens, slots = ids.shape
    hidden = rows_RH.shape[1]
    out = rows_RH.new_empty(tokens, hidden)
    bias = experts.down_proj_bias
    bias = None if bias is None else bias.contiguous()
    constants = {
        **{"E": experts.num_experts, "K": slots, "HIDDEN": hidden, "IDS_T": ids.stride(0), "IDS_K": ids.stride(1)},
        **{"WEIGHTS_T": weights.stride(0), "WEIGHTS_K": weights.stride(1)},
        **{"BLOCK_T": _SUM_TOKENS, "BLOCK_N": _SUM_COLUMNS},
    }
    grid = (triton.cdiv(tokens, _SUM_TOKENS), triton.cdiv(hidden, _SUM_COLUMNS), 1)
    with device_of(rows_RH):
        launch(Launch(weigh_rows, grid, (rows_RH, position, ids, weights, bias, out, tokens), constants))
    return out


def _launch_rows(kernel: Any, arguments: tuple[Any, ...], rows: Rows, cast: Cast | None, more: dict[str, Any]) -> None:
    height, columns = rows.values.shape
    block = cast.group if cast else min(_COLUMNS, triton.next_power_of_2(columns))
    groups = triton.cdiv(columns, block)
    constants = {
        **more,
        **{"GROUP": cast.group if cast else 0, "PACKED": bool(cast and cast.packed), "GROUPS": groups},
        **{"BLOCK_M": _ROWS, "BLOCK_N": block},
    }
    with device_of(rows.values):
        launch(Launch(kernel, (triton.cdiv(height, _ROWS), groups, 1), arguments, constants))


def _sizes(rows: Rows) -> tuple[int, int]:
    """Rows, and how far apart the columns of scales are."""
    return rows.values.shape[0], 0 if rows.scales is None else rows.scales.stride(1)


def _bytes(rows: Rows, cast: Cast | None) -> Tensor | None:
    """Scales as the kernel stores them: packed ones byte by byte."""
    if cast is None or rows.scales is None:
        return None
    columns = rows.scales.t()
    whole = columns.as_strided((columns.shape[0], columns.stride(0)), (columns.stride(0), 1))
    return whole.view(torch.uint8) if cast.packed else whole
