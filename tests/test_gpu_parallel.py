"""Expert parallelism over NCCL on two CUDA devices, and plans on one; skipped, with the reason, where none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_ranks import all_good, run_ranks

import routed_experts as rx
from routed_experts.parallel.plan import count_rows, plan_dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# One rank sends its rows to itself: all of NCCL's calls, on a machine with one device.
worlds = pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_devices)])

E, K, H, INNER, TOKENS = 16, 4, 256, 128, 300
TOLERANCE = 3e-2  # bfloat16, with the partial sums of ranks rounded once more


def make_experts(fmt: str) -> rx.ExpertWeights:
    g = torch.Generator().manual_seed(0)
    up = torch.randn(E, 2 * INNER, H, generator=g) * H**-0.5
    down = torch.randn(E, H, INNER, generator=g) * INNER**-0.5
    trains = fmt == "bfloat16"
    up, down = (t.cuda().to(torch.bfloat16).requires_grad_(trains) for t in (up, down))
    weights = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    return weights if trains else rx.quantize_experts(weights, fmt)


def make_batch(rank: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1 + rank)
    tokens = 0 if routing == "no tokens on one rank" and rank else TOKENS + 7 * rank
    scores, index = torch.rand(tokens, E, generator=g).topk(K)
    index = index % (E // 2) if routing == "idle rank" else index
    return torch.randn(tokens, H, generator=g).cuda().to(torch.bfloat16), index.cuda(), scores.cuda()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()) if wanted.numel() else 0.0


def forward_backward(layer: Any, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, weights = (batch[part].clone().requires_grad_() for part in (0, 2))
    out = layer(x, batch[1], weights)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weights))]


def compare(rank: int) -> dict[str, list[float]]:
    found = {}
    for fmt in ("bfloat16", "fp8_block"):
        experts = make_experts(fmt)
        for dispatch in ("all_reduce", "all_to_all"):
            for routing in ("even", "idle rank", "no tokens on one rank"):
                batch = make_batch(0 if dispatch == "all_reduce" else rank, routing)
                wanted = forward_backward(lambda *b, e=experts: rx.run_experts(*b, e, backend="eager"), batch)
                for chunks in (None, 3):
                    layer = rx.parallel.ExpertParallel(experts, None, dispatch, chunks=chunks, timeout=60)
                    first, second = forward_backward(layer, batch), forward_backward(layer, batch)
                    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "other bits"
                    errors = [error(a, b) for a, b in zip(first, wanted, strict=True)]
                    found[f"{fmt}, {dispatch}, {routing}, chunks={chunks}"] = errors
    return found


@worlds
def test_ranks_equal_one_device(world, tmp_path):
    for results in all_good(run_ranks(compare, world, tmp_path, on="nccl", wait=280)):
        assert len(results) == 24
        for case, errors in results.items():
            assert max(errors) < TOLERANCE, (case, errors)


def capture(rank: int) -> str:
    experts = make_experts("bfloat16")
    batch = make_batch(0, "even")
    layer = rx.parallel.ExpertParallel(experts, None, "all_reduce", timeout=60)
    with torch.no_grad():
        wanted = layer(*batch)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(*batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = layer(*batch)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
    moving = rx.parallel.ExpertParallel(experts, None, "all_to_all", timeout=60)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(rx.DeviceError, match="cannot be captured"), torch.cuda.graph(graph):
        moving(*batch)
    return "good"


@worlds
def test_all_reduce_in_a_cuda_graph(world, tmp_path):
    assert all_good(run_ranks(capture, world, tmp_path, on="nccl")) == ["good"] * world


def late(rank: int) -> str:
    import time

    layer = rx.parallel.ExpertParallel(make_experts("bfloat16"), None, "all_to_all", timeout=5)
    batch = make_batch(rank, "even")
    layer(*batch)
    dist.barrier()
    if rank == 1:
        time.sleep(20)
        return "late"
    start = time.monotonic()
    with pytest.raises(rx.parallel.RankError):
        layer(*batch)
    assert time.monotonic() - start < 12
    return "good"


@two_devices
def test_a_rank_that_does_not_come(tmp_path):
    assert run_ranks(late, 2, tmp_path, on="nccl")[0] == "good"


def test_plans_on_the_device_equal_those_of_rust():
    g = torch.Generator().manual_seed(3)
    for tokens, slots, experts, ranks in ((0, 2, 4, 2), (17, 3, 8, 4), (400, 8, 256, 64)):
        index = torch.randint(-1, experts + 1, (tokens, slots), generator=g)
        here, there = plan_dispatch(index, experts, ranks), plan_dispatch(index.cuda(), experts, ranks)
        for name, right, ours in zip(here._fields, here, there, strict=True):
            assert torch.equal(ours.cpu(), right), name
        counts, other = count_rows(index, experts, ranks, 4), count_rows(index.cuda(), experts, ranks, 4)
        assert torch.equal(other.rows_CW.cpu(), counts.rows_CW)
        assert torch.equal(other.widest.cpu(), counts.widest)
