"""FP8 experts with very many rows on a Hopper GPU, by the kernels in Gluon: numbers, repeats, graphs, other streams."""

from __future__ import annotations

import pytest
import torch
from quantized_stacks import Stored, build, routing
from test_gpu_quantized import distance, on_device, reference

import routed_experts as rx

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
BLOCKS = Stored("fp8_block", (128, 128))
# The last tile of the second product has half its columns: 640 is five blocks.
SIZES = {"experts": 8, "hidden": 640, "inner": 384}


@pytest.fixture
def ran(monkeypatch):
    """Names of the kernels that were launched."""
    from routed_experts.kernels import fused, hopper

    if not hopper.has_gluon():
        pytest.skip("this Triton has no Gluon")
    names, launch = [], fused.launch
    monkeypatch.setattr(fused, "launch", lambda one: names.append(one.kernel.__name__) or launch(one))
    return names


def case(tokens, *, idle=(), dtype=torch.bfloat16, seed=0, **flags):
    weights = on_device(build(BLOCKS, dtype=dtype, seed=seed, **SIZES, **flags)[0])
    x, ids, scale = routing(tokens, 4, SIZES["experts"], SIZES["hidden"], dtype, sentinels=True)
    for expert in idle:
        ids[ids == expert] = -1
    return weights, [t.cuda() for t in (x, ids, scale)]


def poison():
    held = [torch.full((2**power,), 255, dtype=torch.uint8, device="cuda") for power in range(20, 29)]
    del held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "idle"), [(4001, ()), (4096, (2, 7)), (9999, (0, 1, 2, 3, 4, 5, 6))])
def test_numbers(tokens, idle, dtype, ran):
    weights, call = case(tokens, idle=idle, dtype=dtype)
    poison()
    out = rx.run_experts(*call, weights, backend="fused")
    assert ran[-3:] == ["up_hopper", "down_hopper", "weigh"]
    assert distance(out, reference(*call, weights)) < 5e-2


def test_a_token_with_no_expert_gets_zeros(ran):
    weights, call = case(5000)
    call[1][17] = -1
    call[1][4999] = SIZES["experts"]
    poison()
    out = rx.run_experts(*call, weights, backend="fused")
    assert "up_hopper" in ran
    assert not out[17].any()
    assert not out[4999].any()


def test_repeats_streams_and_graphs_give_the_same_bits(ran):
    weights, call = case(4500)
    first = rx.run_experts(*call, weights, backend="fused")
    for _ in range(10):
        poison()
        assert torch.equal(rx.run_experts(*call, weights, backend="fused"), first)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(rx.run_experts(*call, weights, backend="fused"), first)
        with torch.cuda.graph(graph, stream=stream):
            out = rx.run_experts(*call, weights, backend="fused")
    assert "down_hopper" in ran
    fresh = torch.randn_like(call[0])
    wanted = rx.run_experts(fresh, *call[1:], weights, backend="fused")
    call[0].copy_(fresh)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_gates_of_other_models(ran):
    weights, call = case(4500)
    tensors = {**weights._tensors}
    limited = rx.ExpertWeights(**tensors, quantization=weights.quantization, swiglu_limit=1.0, swiglu_alpha=1.702)
    out = rx.run_experts(*call, limited, backend="fused")
    assert "up_hopper" in ran
    assert distance(out, rx.run_experts(*call, limited, backend="eager")) < 5e-2
