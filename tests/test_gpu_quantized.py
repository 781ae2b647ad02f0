"""The kernels for quantized experts on a real GPU: numbers, repeats, graphs."""

from __future__ import annotations

import pytest
import torch
from quantized_stacks import Stored, build, routing

import routed_experts as rx

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMATS = [
    Stored("fp8_block", (128, 128)),
    Stored("fp8_block", (128, 128), ue8m0=True),
    Stored("fp8_block", (32, 48)),
    Stored("mxfp8", (1, 32), ue8m0=True),
    Stored("fp8_tensor"),
    Stored("mxfp4", (1, 32), ue8m0=True),
    Stored("mxfp4", (1, 32)),
]
SIZES = {"experts": 8, "hidden": 544, "inner": 384}


def reference(x, ids, scale, weights):
    """Every expert over every token, in float32 on the dequantized numbers."""
    from routed_experts.quantization import stacks

    up, down = stacks.stack_of(weights, True), stacks.stack_of(weights, False)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(weights.num_experts):
        matrices = [s.values(e).double() for s in (up, down)]
        first, second = matrices if weights.is_transposed else [m.mT for m in matrices]
        u = x.double() @ first
        gate, linear = u.chunk(2, 1) if weights.is_concatenated else (u[:, 0::2], u[:, 1::2])
        share = torch.where(ids == e, scale.double(), 0.0).sum(1, keepdim=True)
        out += torch.nn.functional.silu(gate) * linear @ second * share
    return out


def distance(got, wanted):
    """Norm of the difference over the norm: what quantized rows are allowed 5e-2 of."""
    assert not got.isnan().any()
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def on_device(weights):
    tensors = {name: None if t is None else t.cuda() for name, t in weights._tensors.items()}
    return rx.ExpertWeights(
        **tensors,
        quantization=weights.quantization,
        is_transposed=weights.is_transposed,
        is_concatenated=weights.is_concatenated,
    )


def case(stored, tokens, dtype=torch.bfloat16, **flags):
    weights = on_device(build(stored, dtype=dtype, **SIZES, **flags)[0])
    return weights, [t.cuda() for t in routing(tokens, 4, SIZES["experts"], SIZES["hidden"], dtype, sentinels=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 300, 3000])
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_numbers(stored, tokens, dtype):
    weights, call = case(stored, tokens, dtype)
    out = rx.run_experts(*call, weights, backend="fused")
    assert distance(out, reference(*call, weights)) < 5e-2


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize("stored", [Stored("mxfp8", (1, 32), ue8m0=True), Stored("fp8_tensor")], ids=str)
def test_layouts(stored, is_concatenated, is_transposed, tokens):
    weights, call = case(stored, tokens, is_concatenated=is_concatenated, is_transposed=is_transposed)
    out = rx.run_experts(*call, weights, backend="fused")
    assert distance(out, reference(*call, weights)) < 5e-2


@pytest.mark.parametrize("backend", ["fused", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_backends_in_float32(stored, backend):
    weights, call = case(stored, 30, torch.float32)
    out = rx.run_experts(*call, weights, backend=backend)
    assert distance(out, reference(*call, weights)) < 1e-5


@pytest.mark.parametrize("tokens", [2, 60, 3000])
@pytest.mark.parametrize("stored", [FORMATS[0], FORMATS[5]], ids=str)
def test_repeats_and_graphs_give_the_same_bits(stored, tokens):
    weights, call = case(stored, tokens)
    first = rx.run_experts(*call, weights, backend="fused")
    for _ in range(10):
        assert torch.equal(rx.run_experts(*call, weights, backend="fused"), first)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        rx.run_experts(*call, weights, backend="fused")
        with torch.cuda.graph(graph, stream=stream):
            out = rx.run_experts(*call, weights, backend="fused")
    fresh = torch.randn_like(call[0])
    wanted = rx.run_experts(fresh, *call[1:], weights, backend="fused")
    call[0].copy_(fresh)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_gradients(stored):
    weights, (x, ids, scale) = case(stored, 50, torch.float32)
    ours = [t.clone().requires_grad_() for t in (x, scale)]
    rx.run_experts(ours[0], ids, ours[1], weights, backend="fused").sum().backward()
    wanted = [t.double().requires_grad_() for t in (x, scale)]
    reference(wanted[0], ids, wanted[1], weights).sum().backward()
    for found, expected in zip(ours, wanted, strict=True):
        assert distance(found.grad, expected.grad) < 1e-5
