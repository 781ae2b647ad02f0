"""The numbers of ``fused`` on a CUDA device: every layout, size, dtype, gate and stride against the oracle."""

from __future__ import annotations

import pytest
import torch
from cases import FACTORS
from fused_on_gpu import BACKEND, BASE, DEVICE, NEEDS_CUDA, built, check, compare, on_device, to_device
from oracle import TOLERANCE, experts_oracle, relative_error
from test_backends import PAIRWISE

import routed_experts as rx
from routed_experts.gates import ACTIVATIONS

pytestmark = NEEDS_CUDA

# What the oracle has no name for, as formulas.
OTHER_ACTIVATIONS = {
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", [case for case in PAIRWISE if case.dtype != torch.float64], ids=str)
def test_every_pair_of_factors(case, poisoned):
    check(case)


@pytest.mark.parametrize("tokens", [1, 8, 129])
@pytest.mark.parametrize("sizes", [(40, 264), (264, 40), (7, 5), (6, 5), (1025, 16), (16, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sizes_that_are_no_multiple_of_a_tile(sizes, tokens, dtype):
    """B01, B31."""
    check(sizes=sizes, tokens=tokens, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 17])
def test_wide_and_not_a_power_of_two(tokens):
    check(sizes=(2880, 2880), num_experts=4, tokens=tokens)


@pytest.mark.parametrize("tokens", [1, 8, 129])
@pytest.mark.parametrize("experts", [1, 3, 60, 128, 160, 257, 384, 1024])
def test_numbers_of_experts(experts, tokens):
    """B30."""
    check(num_experts=experts, tokens=tokens, top_k=min(experts, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation(name, is_gated, dtype):
    x, index, weights, tensors, flags = built(dtype=dtype, gate="silu" if is_gated else "no gate, relu2")
    flags = oracle_flags = {**flags, "activation": name}
    if name in OTHER_ACTIVATIONS:
        function, inner = OTHER_ACTIVATIONS[name], BASE.sizes[1]
        gate = (lambda u: function(u[..., :inner]) * u[..., inner:]) if is_gated else function
        oracle_flags = {**flags, "gate": gate}
    compare(x, index, weights, tensors, flags, oracle_flags=oracle_flags)


@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("gate", FACTORS["gate"])
@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_gates_and_layouts(gate, is_transposed, is_concatenated, tokens):
    """B13, B14: the limit and alpha of clamped gates, gates of one's own, and both orders of gate and up."""
    check(gate=gate, is_transposed=is_transposed, is_concatenated=is_concatenated, tokens=tokens, bias=True)


def test_clamps_are_one_sided_on_the_gate():
    """B14: far outside the limit on both sides, where a symmetric clamp or a lost +1 is another number."""
    values = torch.tensor([-20.0, 0.0, 20.0])
    gate, up = (grid.reshape(-1) for grid in torch.meshgrid(values, values, indexing="ij"))
    first = torch.zeros(1, 9)
    first[0, 0] = 1.0
    tensors = {"gate_up_proj": torch.cat([gate, up])[None, :, None] * first, "down_proj": torch.eye(9)[None]}
    one = torch.ones(1, 1)
    compare(first, one.long() - 1, one, tensors, {"swiglu_limit": 7.0, "swiglu_alpha": 1.702})


@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True), (True, True)])
def test_bias_norm_and_the_place_of_the_weight(bias, norm, weights_on, tokens):
    """B17."""
    check(bias=bias, norm=norm, weights_on=weights_on, tokens=tokens)


@pytest.mark.parametrize("tokens", [1, 17, 300])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_sentinels_read_exactly_nothing(expert_parallel, tokens):
    """B20, B21, B25, B26: negative and too large ids; rows that nobody owns are 0, bias or not."""
    x, index, weights, tensors, flags = built(bias=True, tokens=tokens, top_k=4, dtype=torch.bfloat16)
    outside = torch.tensor([-1, -(2**40), BASE.num_experts, BASE.num_experts + 5])
    drawn = torch.Generator().manual_seed(5)
    index = torch.where(torch.rand(index.shape, generator=drawn) < 0.5, outside, index)
    index[::3] = outside
    out = compare(x, index, weights, tensors, flags, expert_parallel=expert_parallel)
    assert not out[::3].any()
    nothing = compare(x, outside.expand(tokens, 4), weights, tensors, flags, expert_parallel=expert_parallel)
    assert not nothing.any()


def test_nan_of_a_sentinel_stays_out():
    """A token whose slots all lie elsewhere may hold anything."""
    x, index, weights, tensors, flags = built(tokens=64)
    index[5] = -1
    clean = compare(x, index, weights, tensors, flags)
    dirty = to_device(x.index_fill(0, torch.tensor(5), float("nan")))
    out = rx.run_experts(dirty, to_device(index), to_device(weights), on_device(tensors, flags), backend=BACKEND)
    assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("routing", ["sentinels", "one expert"])
def test_ids_of_any_integer_dtype(dtype, routing):
    check(index_dtype=dtype, routing=routing, tokens=64)


def test_one_expert_several_times_in_a_token():
    x, _, _, tensors, flags = built(tokens=3)
    index = torch.tensor([[3, 3, 3], [0, 3, 0], [7, 7, 1]])
    compare(x, index, torch.tensor([[0.5, 0.25, 0.25], [0.9, -0.4, 0.0], [1.0, 1.0, 1.0]]), tensors, flags)


def test_weights_meet_their_own_slots():
    """B23: K = E, where ids and weights could be confused."""
    x, _, _, tensors, flags = built(tokens=2, num_experts=2)
    compare(x, torch.tensor([[1, 0], [1, 0]]), torch.tensor([[0.9, 0.1], [0.6, 0.4]]), tensors, flags)


@pytest.mark.parametrize("tokens", [1, 64])
def test_expanded_inputs(tokens):
    """B07: zero strides in hidden states, ids, routing weights and experts."""
    x, _, _, tensors, flags = built(tokens=tokens)
    index, weights = torch.tensor([[2, 5]]).expand(tokens, 2), torch.tensor([[0.75]]).expand(tokens, 2)
    shared = {name: t[:1].expand(BASE.num_experts, -1, -1) for name, t in tensors.items()}
    out = compare(x[:1].expand(tokens, -1), index, weights, shared, flags)
    assert torch.equal(out, out[:1].expand(tokens, -1))


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slices_of_wider_buffers(tokens, dtype):
    """B08, B09, B10: odd row pitches, inner strides, and a start one element off alignment."""
    x, index, weights, tensors, flags = built(tokens=tokens, dtype=dtype)
    wide = {}
    for name, t in tensors.items():
        experts, rows, columns = t.shape
        wide[name] = torch.zeros(experts, rows, columns + 5, dtype=dtype)[:, :, 1 : columns + 1].copy_(t)
    sliced = torch.zeros(tokens, 2 * x.shape[1] + 1, dtype=dtype)[:, 1::2].copy_(x)
    turned = index.t().contiguous().t(), weights.t().contiguous().t()
    compare(sliced, *turned, wide, flags)
    across = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in tensors.items()}
    compare(sliced, *turned, across, flags)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("top_k", [0, 2])
def test_no_tokens_and_no_slots(tokens, top_k):
    """B27."""
    out = check(tokens=tokens, top_k=top_k)
    assert out.any() == (tokens * top_k > 0)


@pytest.mark.parametrize("routing_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_routing_weights_keep_their_dtype(dtype, routing_dtype):
    """B12: the sum over slots is in float32, and the result in the dtype of hidden states."""
    x, index, weights, tensors, flags = built(dtype=dtype, tokens=64, top_k=8)
    compare(x, index, weights.to(routing_dtype), tensors, flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(dtype):
    """B02: float32 hidden states and parameters of either dtype compute in bfloat16 and come back as float32."""
    x, index, weights, tensors, flags = built(dtype=torch.float32, tokens=64)
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    inputs = [to_device(t) for t in (x, index, weights)]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = rx.run_experts(*inputs, on_device(tensors, flags), backend=BACKEND)
    assert out.dtype == torch.float32
    assert relative_error(out.cpu(), experts_oracle(x, index, weights, tensors, flags)) < TOLERANCE[torch.bfloat16]


def test_permuted_tokens_permute_rows():
    x, index, weights, tensors, flags = built(dtype=torch.float32, tokens=129)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(3))
    out = compare(x, index, weights, tensors, flags)
    permuted = compare(x[order], index[order], weights[order], tensors, flags)
    assert relative_error(permuted.cpu(), out.cpu()[order].double()) <= 1e-6
