"""`deepgemm`: the grouped products of DeepGEMM, over rows in a padded layout.

Two products and three launches of ours around them: rows are gathered (and quantized), gated (and quantized), and
summed. Nobody reads rows of padding or sentinels, so what the products leave there reaches nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from routed_experts.backends.spec import Backend, Cost, Requirement, Spec
from routed_experts.deepgemm_operands import Scheme, scheme_of, weight_operand
from routed_experts.external_calls import bind_device, capability_major, refuse_gradient
from routed_experts.layout import ExpertLayout, build_layout
from routed_experts.loaders import DeepGemm, load_kernel
from routed_experts.padded_steps import Rows, gate, gather, weigh
from routed_experts.weights import ExpertWeights

_QUANTIZED = ["fp8_block", "mxfp4"]

_MODULE = (
    {"kind": "no_post_expert_norm"},
    {"kind": "no_gradient"},
    {"kind": "dtype", "any_of": ["bfloat16"]},
    {"kind": "quantization", "any_of": ["none", *_QUANTIZED]},
    {"kind": "dynamic_activation_scales"},
    {
        "kind": "when",
        "formats": ["fp8_block"],
        "then": {"kind": "block", "any_of": [(128, 128), (1, 128)]},
    },
    {"kind": "when", "formats": _QUANTIZED, "then": {"kind": "no_bias"}},
    # Hopper's kernel has one scale for 128 rows of a weight; its instructions want both operands K-major.
    {"kind": "when", "major": 9, "formats": ["fp8_block"], "then": {"kind": "block", "any_of": [(128, 128)]}},
    {"kind": "when", "major": 9, "formats": ["fp8_block"], "then": {"kind": "not_transposed"}},
    {
        "kind": "when",
        "major": 9,
        "then": {"kind": "scales", "any_of": [("fp8_block", "float32"), ("fp8_block", "ue8m0")]},
    },
    {
        "kind": "when",
        "major": 10,
        "then": {"kind": "scales", "any_of": [("fp8_block", "ue8m0"), ("mxfp4", "ue8m0")]},
    },
    # Scales of transposed weights are transposed too, which no packing of ours reads.
    {"kind": "when", "formats": _QUANTIZED, "then": {"kind": "not_transposed"}},
    {"kind": "experts_packed"},
    {"kind": "weights_aligned", "bytes": 16},
    # Function handles belong to the context that loaded them: another device computes garbage in silence.
    {"kind": "single_device"},
    {"kind": "not_compiling"},
)

_MACHINE = (
    {"kind": "kernel", "name": "deepgemm", "package": "kernels", "installed": "deep_gemm"},
    # 9 and 10 only: there is no build for SM110 and SM120.
    {"kind": "capability_major", "any_of": [9, 10]},
    {"kind": "toolkit"},
    {"kind": "nvcc"},
    {"kind": "toolkit_version", "rows": [{"major": 9, "min": "12.3"}, {"major": 10, "min": "12.9"}]},
    {"kind": "kernel_loads", "name": "deepgemm"},
)


def run(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run the experts of every token and sum over slots: bfloat16 (T, H)."""
    refuse_gradient("deepgemm", x_TH, weights_TK, *experts.tensors())
    kernel = load_kernel("deepgemm")
    bind_device("deepgemm", x_TH.device)
    scheme = scheme_of(experts, capability_major(x_TH.device))
    layout = build_layout(index_TK, experts.num_experts, alignment=kernel.mk_alignment())
    rows, position = gather(x_TH, layout, index_TK.shape[1], scheme.cast)
    u_RN = _product(kernel, experts, rows, "up", layout, scheme)
    down = _product(kernel, experts, gate(u_RN, experts, layout, scheme.cast), "down", layout, scheme)
    return weigh(down, position, experts, index_TK, weights_TK)


run.load = partial(load_kernel, "deepgemm")  # type: ignore[attr-defined]


def _product(
    kernel: DeepGemm, experts: ExpertWeights, rows: Rows, which: str, layout: ExpertLayout, scheme: Scheme
) -> Tensor:
    """Rows (R, K) times their experts' weights: bfloat16 (R, N), unwritten where nobody has a row."""
    assert layout.starts is not None
    weight = experts.up_weight if which == "up" else experts.down_weight
    columns = weight.shape[2 if experts.is_transposed else 1]
    out = torch.empty(rows.values.shape[0], columns, dtype=torch.bfloat16, device=rows.values.device)
    groups = layout.starts[1:] if scheme.psum else layout.row_expert
    if scheme.cast is None:
        product: Any = kernel.bf16_nn if experts.is_transposed else kernel.bf16_nt
        product(rows.values, weight, out, groups, use_psum_layout=scheme.psum)
        return out
    operand = weight_operand(weight, getattr(experts, f"{which}_scale"), scheme)
    kernel.fp8_fp4_nt(rows.operand(), operand, out, groups, recipe=scheme.recipe, use_psum_layout=scheme.psum)
    return out


def _row(path: str, cost: Cost, *own: Requirement) -> tuple[Spec, Any]:
    requires: tuple[Requirement, ...] = (*_MODULE, *own, *_MACHINE)
    return Spec(name="deepgemm", path=path, devices=("cuda",), requires=requires, cost={"cuda": cost}), run


# Both rows ask for all the rest first, so that a refusal reads the same from either. Costs are of DeepGEMM 2.8.1 on
# an H200 (benches/results/h200-deepgemm.json), within 13 % of every time there; FP4 was not measured.
BACKEND = Backend(
    rows=(
        _row(
            "bf16",
            Cost(call_us=310, captured_us=250, bytes_per_us=4.4e6, flops_per_us=4.9e8),
            {"kind": "unquantized"},
        ),
        _row(
            "quantized",
            Cost(call_us=230, captured_us=130, bytes_per_us=4e6, flops_per_us=7.1e8),
            {"kind": "quantization", "any_of": _QUANTIZED},
        ),
    )
)
