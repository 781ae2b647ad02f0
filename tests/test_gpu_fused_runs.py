"""``fused`` on a CUDA device: repeats, distance from float32, sizes beyond 32 bits, compilation, gradients."""

from __future__ import annotations

import pytest
import torch
from cases import own_gate
from fused_on_gpu import BACKEND, DEVICE, NEEDS_CUDA, assert_right, built, on_device, poison, run, to_device
from oracle import experts_oracle, relative_error

import routed_experts as rx

pytestmark = NEEDS_CUDA


def large(tokens, experts, top_k, hidden, inner, dtype=torch.bfloat16, seed=0):
    """Return inputs and weights of unit scale, drawn on the device; routing prefers some experts."""
    g = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=DEVICE)

    tensors = {
        "gate_up_proj": (normal(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype),
        "down_proj": (normal(experts, hidden, inner) * inner**-0.5).to(dtype),
    }
    scores, index = (normal(tokens, experts) + 0.8 * normal(experts)).softmax(-1).topk(top_k, -1)
    x = torch.empty(tokens, hidden, dtype=dtype, device=DEVICE).normal_(generator=g)
    return (x, index, scores / scores.sum(-1, keepdim=True)), tensors


@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_bits_twenty_times(tokens, deterministic):
    """B33, B34: also where torch is told to be deterministic."""
    inputs, tensors = large(tokens, 60, 8, 1024, 384)
    experts = rx.ExpertWeights(**tensors)
    first = run(inputs, experts)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(20):
            poison()
            assert torch.equal(run(inputs, experts), first)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 2048])
def test_no_further_from_float32_than_two_roundings(tokens):
    inputs, tensors = large(tokens, 16, 8, 2048, 768)
    out = run(inputs, rx.ExpertWeights(**tensors)).float()
    exact = rx.ExpertWeights(**{name: t.float() for name, t in tensors.items()})
    wanted = rx.run_experts(inputs[0].float(), *inputs[1:], exact, backend="eager")
    assert (out - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_float32_is_float32(tokens):
    """B18: no TF32 unless torch's own switch allows it."""
    inputs, tensors = large(tokens, 2, 2, 1024, 512, torch.float32)
    out = run(inputs, rx.ExpertWeights(**tensors))
    wanted = experts_oracle(*(t[:9].cpu() for t in inputs), {name: t.cpu() for name, t in tensors.items()}, {})
    assert relative_error(out[:9].cpu(), wanted) < 1e-5


def test_more_values_than_32_bits_count():
    """T*K*H is beyond 2^31, and so are the offsets of the last rows; rows are independent, so some are compared."""
    tokens, part = 131073, 64
    inputs, tensors = large(tokens, 64, 8, 2048, 64)
    assert inputs[1].numel() * inputs[0].shape[1] > 2**31
    poison()
    out = run(inputs, rx.ExpertWeights(**tensors))
    assert out.isfinite().all()
    on_cpu = {name: t.cpu() for name, t in tensors.items()}
    for start in (0, 77_777, tokens - part):
        rows = slice(start, start + part)
        assert_right(out[rows], [t[rows].cpu() for t in inputs], on_cpu, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("changes", [{}, {"gate": "oai", "is_concatenated": False}, {"bias": True}], ids=str)
def test_compiled_is_eager(changes, dtype):
    """B05: one graph, the same bits, for several token counts."""
    torch.compiler.reset()
    tensors, flags = built(dtype=dtype, **changes)[3:]
    experts = on_device(tensors, flags)
    compiled = torch.compile(lambda *inputs: run(inputs, experts), fullgraph=True)
    for tokens in (1, 17, 300):
        inputs = [to_device(t) for t in built(1, tokens=tokens, dtype=dtype, **changes)[:3]]
        with torch.no_grad():
            assert torch.equal(compiled(*inputs), run(inputs, experts))


def test_compiled_with_a_gate_of_ones_own():
    torch.compiler.reset()
    x, index, weights, tensors, _ = built(gate="own")
    experts = on_device(tensors, {"gate": own_gate})
    compiled = torch.compile(lambda *inputs: run(inputs, experts), fullgraph=True)
    with torch.no_grad():
        out = compiled(*(to_device(t) for t in (x, index, weights)))
    assert_right(out, (x, index, weights), tensors, {"gate": own_gate})


def test_accepted_on_this_device_and_chosen_for_decode():
    inputs, tensors = large(1, 16, 8, 2048, 768)
    experts = rx.ExpertWeights(**tensors)
    for capturing in (False, True):
        assert rx.select_backend(experts, num_tokens=1, num_top_k=8, capturing=capturing).name == BACKEND
    assert torch.equal(rx.run_experts(*inputs, experts), run(inputs, experts))
