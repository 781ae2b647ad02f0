"""Quantized experts on eager, batched_mm and grouped_mm against dequantized weights in float64."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from oracle import TOLERANCE, experts_oracle, relative_error
from quantized_cases import BACKENDS, E8M0, EXPERTS, HIDDEN, LAYOUTS, SCHEMES, name_of, quantized, routed
from quantized_oracle import tensors_of

import routed_experts as rx
from routed_experts.products.quantized import matrix_bytes
from routed_experts.quantization.stacks import stack_of

# A scheme each, in the plainest layout.
PLAIN = [(scheme, False, True, True, False) for scheme in SCHEMES]


def compare(experts, flags, x, index, weights, backend, **how):
    got = rx.run_experts(x, index, weights, experts, backend=backend, **how)
    assert got.dtype == x.dtype
    wanted = experts_oracle(x, index, weights, tensors_of(experts), flags)
    assert relative_error(got, wanted) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_format_scale_and_layout(layout, backend, poisoned):
    experts, _, flags = quantized(layout)
    poisoned()
    compare(experts, flags, *routed(sentinels=True), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
def test_half_precision_activations(layout, dtype, backend):
    experts, _, flags = quantized(layout)
    compare(experts, flags, *routed(dtype=dtype), backend)


@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
def test_distance_from_what_was_quantized(layout):
    experts, plain, _ = quantized(layout)
    call = routed(tokens=64)
    wanted = rx.run_experts(*call, plain, backend="eager")
    bound = 3e-1 if layout[0][0] == "mxfp4" else 9e-2
    for backend in (*BACKENDS, "auto"):
        got = rx.run_experts(*call, experts, backend=backend)
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert 1e-3 < error < bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [LAYOUTS[0], PLAIN[-2]], ids=name_of)
def test_calls_of_every_size(layout, backend):
    experts, _, flags = quantized(layout)
    for tokens, top_k in ((0, 2), (3, 0), (1, 1), (1, 8), (129, 3)):
        compare(experts, flags, *routed(tokens, top_k), backend)
    x, index, weights = routed()
    compare(experts, flags, x, torch.full_like(index, -1), weights, backend)
    compare(experts, flags, x.t().contiguous().t(), index.int(), weights, backend)
    norm = {"post_expert_norm": lambda d: d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 0.5)}
    experts, _, flags = quantized(layout, **norm)
    compare(experts, flags, x, index, weights, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clamped_and_own_gates_are_kept(backend):
    def softcapped(u):
        return torch.tanh(u[..., 0::2]) * u[..., 1::2]

    for changes in ({"swiglu_limit": 0.75, "swiglu_alpha": 1.702}, {"gate": softcapped}, {"activation": "gelu"}):
        experts, _, flags = quantized(PLAIN[0], **changes)
        compare(experts, flags, *routed(), backend)


def test_half_of_gate_and_up_shorter_than_a_block():
    layout = (("fp8_block", (128, 128), torch.float32), False, True, True, False)
    gate_up = torch.randn(2, 64, 128) / 11
    gate_up[:, 32:] *= 100  # up rows in the gate's block would cost the gate its precision
    plain = rx.ExpertWeights(gate_up_proj=gate_up, down_proj=torch.randn(2, 128, 32) / 6)
    experts = rx.quantize_experts(plain, *layout[0][:1], block=layout[0][1])
    assert experts.up_scale.shape == (2, 2, 1)
    assert (experts.up_scale[:, 1] > 20 * experts.up_scale[:, 0]).all()
    x, index, weights = torch.randn(9, 128), torch.randint(0, 2, (9, 2)), torch.rand(9, 2)
    for backend in BACKENDS:
        compare(experts, {}, x, index, weights, backend)


def test_gate_and_up_have_a_scale_each_per_tensor():
    gate_up = torch.ones(1, 4, 32)
    gate_up[:, 2:] = 100
    for concatenated in (True, False):
        rows = gate_up if concatenated else gate_up[:, [0, 2, 1, 3]]
        plain = rx.ExpertWeights(gate_up_proj=rows, down_proj=torch.ones(1, 32, 2), is_concatenated=concatenated)
        experts = rx.quantize_experts(plain, "fp8_tensor")
        assert experts.up_scale.flatten().tolist() == pytest.approx([1 / 448, 100 / 448])
        torch.testing.assert_close(tensors_of(experts)["gate_up_proj"].float(), rows)


def test_only_hit_experts_are_dequantized(monkeypatch):
    experts, _, _ = quantized(PLAIN[0])
    seen = []
    scaled = type(stack_of(experts, True)).scaled

    def record(stack, value, expert):
        seen.append((expert if isinstance(expert, int) else expert.tolist(), value.dim()))
        return scaled(stack, value, expert)

    monkeypatch.setattr("routed_experts.quantization.stacks.Stack.scaled", record)
    x, weights = torch.randn(4, HIDDEN), torch.ones(4, 2)
    index = torch.tensor([[1, 3]] * 4)
    for backend in ("eager", "grouped_mm"):
        seen.clear()
        rx.run_experts(x, index, weights, experts, backend=backend)
        assert sorted(seen) == [(1, 2), (1, 2), (3, 2), (3, 2)], backend  # once for each projection


def test_copies_stay_under_the_budget(monkeypatch, caplog):
    experts, _, _ = quantized(PLAIN[0])
    x, index, weights = routed()
    whole = rx.run_experts(x, index, weights, experts, backend="batched_mm")
    limit = 3 * matrix_bytes(stack_of(experts, True), x.dtype)
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", str(limit))
    sizes = []
    values = type(stack_of(experts, True)).values

    def record(stack, expert):
        made = values(stack, expert)
        sizes.append(made.shape[0] * matrix_bytes(stack, x.dtype))
        return made

    monkeypatch.setattr("routed_experts.quantization.stacks.Stack.values", record)
    with caplog.at_level(logging.INFO, "routed_experts"):
        small = rx.run_experts(x, index, weights, experts, backend="batched_mm")
    assert len(sizes) > 10
    assert max(sizes) <= limit
    assert "copies 34 expert matrices" in caplog.text
    torch.testing.assert_close(small, whole, rtol=1e-5, atol=1e-6)


def test_no_copy_of_the_layer_is_made():
    """The largest allocation of a call on grouped_mm is a matrix in float32, not the stack."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype.is_floating_point and out.dtype.itemsize > 1:
                self.size = max(self.size, out.numel() * out.itemsize)
            return out

    experts, _, _ = quantized(PLAIN[0])
    call = routed()
    rx.run_experts(*call, experts, backend="grouped_mm")
    with Largest() as largest:
        rx.run_experts(*call, experts, backend="grouped_mm")
    assert 0 < largest.size <= experts.up_weight[0].numel() * 4


def test_same_bits_on_every_run_and_after_pickling():
    for layout in PLAIN:
        experts, _, _ = quantized(layout)
        call = routed(dtype=torch.bfloat16)
        first = {backend: rx.run_experts(*call, experts, backend=backend) for backend in BACKENDS}
        for other in (experts, pickle.loads(pickle.dumps(experts)), copy.deepcopy(experts)):
            assert other.quantization == experts.quantization
            for backend in BACKENDS:
                assert torch.equal(rx.run_experts(*call, other, backend=backend), first[backend])


def test_properties_and_repr():
    experts, _, _ = quantized(PLAIN[-2])
    assert experts.dtype == torch.int8
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (EXPERTS, HIDDEN, 96)  # B47
    assert experts.gate_up_proj.shape == (EXPERTS, 192, HIDDEN // 2)
    assert experts.up_scale is experts.gate_up_proj_scale_inv
    assert experts.up_scale.dtype == experts.down_scale.dtype == E8M0
    assert experts.down_scale.shape == (EXPERTS, HIDDEN, 3)
    assert experts.up_activation_scale is experts.down_activation_scale is None
    assert "quantization=Quantization(fmt='mxfp4'" in repr(experts)
    other = experts.with_tensors(dict(experts._tensors))
    assert other.quantization is experts.quantization
    assert torch.equal(rx.run_experts(*routed(), other), rx.run_experts(*routed(), experts))


def test_raw_bytes_are_taken_for_what_they_are():
    experts, _, _ = quantized(PLAIN[-2])
    names = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    raw = {name: getattr(experts, name).view(torch.uint8) for name in names}
    again = rx.ExpertWeights(**raw, quantization=rx.Quantization("mxfp4"))
    assert again.down_scale.dtype == E8M0
    assert again.dtype == torch.int8
    assert torch.equal(rx.run_experts(*routed(), again), rx.run_experts(*routed(), experts))


def test_autocast_and_casts():
    experts, _, flags = quantized(PLAIN[0])
    x, index, weights = routed()
    plain = rx.run_experts(x, index, weights, experts, backend="grouped_mm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rx.run_experts(x, index, weights, experts, backend="grouped_mm"), plain)
    with pytest.raises(rx.DtypeError, match="float64"):
        rx.run_experts(x.double(), index, weights, experts)
    double = rx.run_experts(x.double(), index, weights, experts, allow_cast=True)
    assert double.dtype == torch.float64
    wanted = experts_oracle(x, index, weights, tensors_of(experts), flags)
    assert relative_error(double, wanted) < 1e-5
