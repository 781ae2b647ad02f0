"""Packed experts: the same values in rows, and what that costs."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error
from quantized_cases import LAYOUTS, name_of, quantized, routed

import routed_experts as rx
from routed_experts.packing import pack_experts, packed_bytes

TRANSPOSED = [layout for layout in LAYOUTS if layout[1]]


def run(experts, inputs):
    return rx.run_experts(*inputs, experts, backend="fused")


@pytest.mark.parametrize("layout", TRANSPOSED, ids=name_of)
def test_quantized_experts_give_the_same_bits(layout):
    experts, *_ = quantized(layout)
    packed = pack_experts(experts)
    assert not packed.is_transposed
    assert packed.quantization == experts.quantization
    inputs = routed(dtype=torch.bfloat16)
    assert torch.equal(run(packed, inputs), run(experts, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floating_experts_and_what_is_kept(dtype):
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(3, 40, 64, generator=g).to(dtype), torch.randn(3, 32, 40, generator=g).to(dtype)
    bias = torch.randn(3, 64, generator=g).to(dtype)
    flags = {"is_concatenated": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.7, "is_transposed": True}
    experts = rx.ExpertWeights(gate_up_proj=up, down_proj=down, gate_up_proj_bias=bias, **flags)
    packed = pack_experts(experts)
    assert packed.gate_up_proj_bias is bias
    assert packed.gate_up_proj.is_contiguous()
    x, ids, weights = torch.randn(7, 40, generator=g).to(dtype), torch.randint(0, 3, (7, 2)), torch.rand(7, 2)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_error(run(packed, (x, ids, weights)), run(experts, (x, ids, weights)).double()) < tolerance


def test_bytes_are_those_of_the_copy():
    experts, *_ = quantized(TRANSPOSED[0])
    packed = pack_experts(experts)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    new = [t for name in names if (t := getattr(packed, name)) is not getattr(experts, name)]
    assert packed_bytes(experts) == sum(t.nbytes for t in new) > 0
    assert packed_bytes(packed) == 0
    assert pack_experts(packed) is packed
