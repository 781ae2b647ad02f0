"""``fused`` on CUDA devices: captured in graphs, on streams, without waiting, on several devices."""

from __future__ import annotations

import pytest
import torch
from fused_on_gpu import NEEDS_CUDA, assert_right, built, on_device, poison, run, to_device

pytestmark = NEEDS_CUDA

FLAGS = ({}, {"bias": True, "norm": True}, {"gate": "own"})


@pytest.fixture
def capture():
    """Capture a call into a CUDA graph, on a stream of its own when one is given; return the graph and its output."""

    def capture(call, stream=None):
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            call()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = call()
        return graph, out

    return capture


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("changes", FLAGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_captured_and_replayed(capture, tokens, changes, own_stream):
    """B72: replays with other tokens and other routing, sentinels and one crowded expert among them."""
    changes = {"tokens": tokens, **changes}
    x, index, weights, tensors, flags = built(**changes)
    experts, static = on_device(tensors, flags), [to_device(t) for t in (x, index, weights)]
    with torch.no_grad():
        graph, out = capture(lambda: run(static, experts), torch.cuda.Stream() if own_stream else None)
    for seed, routing in enumerate(("all here", "sentinels", "one expert", "all sentinels", "all here"), 1):
        fresh = built(seed, **changes, routing=routing)[:3]
        for place, value in zip(static, fresh, strict=True):
            place.copy_(value)
        poison_beside_graph()
        graph.replay()
        assert_right(out, fresh, tensors, flags)
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        if routing == "all sentinels":
            assert not out.any()


def poison_beside_graph():
    """NaN in memory that the graph does not own: nothing outside its pool may be read."""
    torch.cuda.synchronize()
    poison()


def test_several_calls_in_one_graph(capture):
    """Two layers of other sizes, one after the other, share no scratch memory that the second overwrites."""
    x, index, weights, tensors, flags = built(tokens=64)
    second, other_flags = built(7, tokens=64, gate="own", sizes=(64, 160))[3:]
    layers = on_device(tensors, flags), on_device(second, other_flags)
    static = [to_device(t) for t in (x, index, weights)]

    def both():
        middle = run(static, layers[0])
        return middle, run((middle, *static[1:]), layers[1])

    with torch.no_grad():
        graph, (middle, out) = capture(both)
    graph.replay()
    assert_right(middle, (x, index, weights), tensors, flags)
    assert_right(out, (middle.cpu(), index, weights), second, other_flags)


def test_launched_on_the_current_stream():
    """What the stream still has to do comes first: a call elsewhere would read old tokens."""
    x, index, weights, tensors, flags = built(tokens=64)
    experts, static = on_device(tensors, flags), [to_device(t) for t in (x, index, weights)]
    run(static, experts)
    fresh = [to_device(t) for t in built(1, tokens=64)[:3]]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for place, value in zip(static, fresh, strict=True):
            place.copy_(value)
        out = run(static, experts)
    side.synchronize()
    assert_right(out, [t.cpu() for t in fresh], tensors, flags)


@pytest.mark.parametrize("changes", FLAGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_waits_for_nothing(tokens, changes):
    x, index, weights, tensors, flags = built(tokens=tokens, **changes)
    experts, inputs = on_device(tensors, flags), [to_device(t) for t in (x, index, weights)]
    run(inputs, experts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run(inputs, experts, expert_parallel=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(out, (x, index, weights), tensors, flags)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("tokens", [1, 64])
def test_two_devices_in_one_process(order, tokens):
    """B68: launched under the tensors' device, whatever the current one is."""
    x, index, weights, tensors, flags = built(tokens=tokens)
    for place in order:
        device = f"cuda:{place}"
        out = run([to_device(t, device) for t in (x, index, weights)], on_device(tensors, flags, device))
        assert out.device == torch.device(device)
        assert torch.cuda.current_device() == 0
        assert_right(out, (x, index, weights), tensors, flags)
