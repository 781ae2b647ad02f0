"""`fused` on CPU: the whole layer in one call of the Rust core.

Weights are read in place, whatever their strides; x, weights and routing weights may be of any of three dtypes each.
Quantized weights are unfolded in registers, and activations never quantized.
A gate or norm of one's own stands between two products that are calls of their own. Where a gradient is wanted the
call is `grouped_mm`'s, whose products know their backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts import _core
from routed_experts.backends import grouped_mm
from routed_experts.combine import combine, dispatch, pair_routes, sorted_routes, wants_grad
from routed_experts.compiled import declared, experts_of, is_transposed
from routed_experts.gates import apply_gate
from routed_experts.layout import ID_CODES, build_layout
from routed_experts.weights import ExpertWeights

# Codes of `dtype` in rust/bindings/src/experts.rs.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_E4M3, _E2M1 = 3, 4
_FLOAT_SCALES, _E8M0 = 0, 1


def run(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run the experts of every token and sum over slots: (T, H) in the dtype of x."""
    if wants_grad(x_TH, weights_TK, *experts.tensors()):
        return _run_grouped(experts, x_TH, index_TK, weights_TK)
    in_one = experts.gate is None and experts.activation_name is not None and experts.post_expert_norm is None
    if torch.compiler.is_compiling() or type(x_TH) is not Tensor:
        return _traced(experts, x_TH, index_TK, weights_TK, in_one)
    if in_one:
        return _run_layer(experts, x_TH, index_TK, weights_TK)
    up = _rows(experts, x_TH, index_TK, is_second=False)
    slots = _rows(experts, apply_gate(experts, up), index_TK, is_second=True)
    return _weigh(experts, slots, index_TK, weights_TK)


def _run_grouped(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The same numbers with autograd."""
    layout = build_layout(index_TK, experts.num_experts)
    routes = sorted_routes(layout, index_TK.shape)
    rows = grouped_mm.run(experts, dispatch(x_TH, routes), layout, way="loop")
    return combine(rows, weights_TK, routes, x_TH.dtype)


def _weigh(experts: ExpertWeights, slots_SH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if experts.post_expert_norm is not None:
        slots_SH = experts.post_expert_norm(slots_SH)
    return combine(slots_SH, weights_TK, pair_routes(index_TK, experts.num_experts), slots_SH.dtype)


def _run_layer(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if weights.dtype not in CODES:
        weights = weights.float()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _plan(experts).run(
        ids.shape,
        _grid(x, CODES),
        _grid(ids, ID_CODES),
        _grid(weights, CODES),
        (_addresses(experts, is_second=False), _addresses(experts, is_second=True)),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _rows(experts: ExpertWeights, x: Tensor, ids: Tensor, *, is_second: bool) -> Tensor:
    """One product: x (T, H) to (S, N), or (S, I) to (S, H), in pair order; rows without an expert read 0."""
    weight, *_ = _product(experts, is_second)
    out = x.new_empty(ids.numel(), weight.shape[2 if experts.is_transposed else 1])
    repeats = 1 if is_second else ids.shape[1]
    grids = _grid(x, CODES), repeats, _grid(ids, ID_CODES)
    addresses = _addresses(experts, is_second=is_second)
    _plan(experts).rows(is_second, ids.shape, *grids, addresses, out.data_ptr(), torch.get_num_threads())
    return out


def _product(experts: ExpertWeights, is_second: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return weight, bias and scales of a projection."""
    if is_second:
        return experts.down_weight, experts.down_proj_bias, experts.down_scale
    return experts.up_weight, experts.up_bias, experts.up_scale


def _plan(experts: ExpertWeights) -> _core.CpuExperts:
    """What Rust must know of the layout, which all weights that share ``_plans`` have in common."""
    plan = experts._plans.get("cpu")
    if plan is None:
        gate = (
            experts.activation_name or "identity",
            experts.has_gate,
            experts.is_concatenated,
            experts.swiglu_limit,
            experts.swiglu_alpha,
        )
        weights = _strides(experts, is_second=False), _strides(experts, is_second=True)
        formats = _format(experts, is_second=False), _format(experts, is_second=True)
        plan = experts._plans["cpu"] = _core.CpuExperts(experts.num_experts, weights, formats, gate)
    return plan


def _strides(experts: ExpertWeights, *, is_second: bool) -> tuple[int, ...]:
    weight, bias, _ = _product(experts, is_second)
    matrix = weight.mT if experts.is_transposed else weight
    _, columns, depth = matrix.shape
    packed = experts.quantization is not None and experts.quantization.is_fp4
    of_bias = (0, 0) if bias is None else bias.stride()
    return columns, 2 * depth if packed else depth, *matrix.stride(), *of_bias


def _format(experts: ExpertWeights, *, is_second: bool) -> tuple[int, int, tuple[Any, ...] | None]:
    """Code of the weights, code of the bias, and how scales lie: rows of blocks along the columns of a product."""
    _, bias, scale = _product(experts, is_second)
    of_bias = 0 if bias is None else CODES[bias.dtype]
    scheme = experts.quantization
    if scheme is None or scale is None:
        return CODES[experts.dtype], of_bias, None
    halves = experts.has_gate and not is_second
    columns, depth, *_ = _strides(experts, is_second=is_second)
    alternate = halves and scheme.block is None and not experts.is_concatenated
    if scheme.block is None:
        block = (columns // 2 if halves else columns, depth)
    else:
        block = (scheme.row_block(columns, halves), scheme.block[1])
        scale = scale.mT if experts.is_transposed else scale
    code = _E2M1 if scheme.is_fp4 else _E4M3
    of_scale = _FLOAT_SCALES if scale.dtype == torch.float32 else _E8M0
    return code, of_bias, (of_scale, *scale.stride(), *block, alternate)


def _grid(tensor: Tensor, codes: dict[torch.dtype, int]) -> tuple[int, int, int, int]:
    row, column = tensor.stride()
    return tensor.data_ptr(), codes[tensor.dtype], row, column


def _addresses(experts: ExpertWeights, *, is_second: bool) -> tuple[int, int, int]:
    weight, bias, scale = _product(experts, is_second)
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0 if scale is None else scale.data_ptr()


def _traced(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor, in_one: bool) -> Tensor:
    """Put a call into the graph that is being traced; a gate or norm of one's own is traced between operators."""
    ops, tensors, text = torch.ops.routed_experts, experts.tensors(), declared(experts)
    if in_one:
        return ops.fused_cpu(x, ids, weights, tensors, text)
    up = ops.fused_cpu_rows(x, ids, tensors, text, False)
    return _weigh(experts, ops.fused_cpu_rows(apply_gate(experts, up), ids, tensors, text, True), ids, weights)


@torch.library.custom_op("routed_experts::fused_cpu", mutates_args=())
def _fused_cpu(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    return _run_layer(experts_of(tensors, text), x, ids, weights)


@torch.library.custom_op("routed_experts::fused_cpu_rows", mutates_args=())
def _fused_cpu_rows(x: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str, is_second: bool) -> Tensor:
    return _rows(experts_of(tensors, text), x, ids, is_second=is_second)


@_fused_cpu.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@_fused_cpu_rows.register_fake
def _(x: Tensor, ids: Tensor, tensors: list[Tensor | None], text: str, is_second: bool) -> Tensor:
    # Fakes hold no memory, so the checks of real weights cannot run.
    gated, ungated, down, *_ = tensors
    weight = down if is_second else ungated if gated is None else gated
    assert weight is not None
    return x.new_empty(ids.numel(), weight.shape[2 if is_transposed(text) else 1])
