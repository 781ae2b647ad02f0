"""``fused`` on a CUDA device, forward and backward: numbers, repeats, memory, graphs, compilation, an example."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fused_on_gpu import BACKEND, BASE, DEVICE, NEEDS_CUDA, built, poison, run
from oracle import relative_error
from test_backends import PAIRWISE, leaf_like, run_all_rows
from test_gpu_fused_runs import large
from torch.utils.checkpoint import checkpoint

import routed_experts as rx
from routed_experts.backends import fused

pytestmark = NEEDS_CUDA

FLAGS = ({"bias": True}, {"gate": "oai", "is_concatenated": False}, {"gate": "own", "norm": True})


SPEC, FUNCTION = fused.BACKEND.rows[0]
ROWS = [SimpleNamespace(name=SPEC.name, path=SPEC.path, spec=SPEC, run=FUNCTION)]


@pytest.mark.parametrize("case", [c for c in PAIRWISE if c.dtype != torch.float64 and c.tokens * c.top_k], ids=str)
def test_every_pair_of_factors(case):
    poison()
    assert run_all_rows(case, DEVICE, rows=ROWS)


@pytest.mark.parametrize("sizes", [(40, 264), (264, 40), (7, 5), (1025, 16), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("changes", FLAGS, ids=str)
def test_sizes_that_are_no_multiple_of_a_tile(changes, dtype, sizes):
    poison()
    sizes_and_routing = {"tokens": 129, "num_experts": 3, "sizes": sizes, "routing": "sentinels"}
    case = dataclasses.replace(BASE, **sizes_and_routing, dtype=dtype, **changes)
    run_all_rows(case, DEVICE, rows=ROWS, slack=2)


def leaves_of(inputs, tensors):
    x, _, weights = inputs
    return {name: leaf_like(t.detach(), DEVICE) for name, t in {"x": x, "weights": weights, **tensors}.items()}


def step(leaves, index, cotangent, flags, *, call=None, backend=BACKEND):
    """Forward and backward, with a cotangent or one that is made of the result; return the result."""
    for leaf in leaves.values():
        leaf.grad = None
    named = {name: leaf for name, leaf in leaves.items() if name not in ("x", "weights")}
    experts = rx.ExpertWeights(**named, **flags)

    def forward(x, weights):
        return rx.run_experts(x, index, weights, experts, backend=backend)

    out = (call or (lambda f, *given: f(*given)))(forward, leaves["x"], leaves["weights"])
    out.backward(cotangent(out.detach()) if callable(cotangent) else cotangent)
    return out.detach()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_large_calls_against_float32(tokens, is_transposed):
    """Operands by descriptor where the device has them, and sums over many rows."""
    inputs, tensors = large(tokens, 8, 2, 2048, 768)
    flags = {"is_transposed": is_transposed}
    if is_transposed:
        tensors = {name: t.mT.contiguous() for name, t in tensors.items()}
    leaves = leaves_of(inputs, tensors)
    cotangent = torch.randn_like(leaves["x"])
    step(leaves, inputs[1], cotangent, flags)
    exact = {name: leaf_like(leaf.detach().float(), DEVICE) for name, leaf in leaves.items()}
    step(exact, inputs[1], cotangent.float(), flags, backend="eager")
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.float() - exact[name].grad).norm() <= 8e-3 * exact[name].grad.norm(), name


@pytest.mark.parametrize("changes", FLAGS, ids=str)
def test_twenty_steps_twice_are_equal_bits(changes):
    def train():
        x, index, weights, tensors, flags = built(tokens=300, num_experts=60, top_k=4, **changes)
        leaves, index = leaves_of((x, index, weights), tensors), index.to(DEVICE)
        parameters = [leaf for name, leaf in leaves.items() if name not in ("x", "weights")]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        target = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, x.dtype)
        distances = []
        for _ in range(20):
            poison()
            out = step(leaves, index, lambda out: out - target, flags)
            distances.append((out - target).float().norm())
            optimizer.step()
        assert distances[-1] < distances[0]
        return [leaf.grad.clone() for leaf in leaves.values()] + [leaf.detach().clone() for leaf in parameters]

    for one, other in zip(train(), train(), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_is_what_is_stated(recompute, monkeypatch):
    """Bytes that stay for the backward, and the most there are; see kernels/training.py."""
    tokens, top_k, hidden, inner = 4096, 8, 2048, 768
    inputs, tensors = large(tokens, 64, top_k, hidden, inner)
    leaves, flags = leaves_of(inputs, tensors), {}
    cotangent = torch.randn_like(leaves["x"])
    step(leaves, inputs[1], cotangent, flags)
    if recompute:
        monkeypatch.setenv("ROUTED_EXPERTS_FUSED_RECOMPUTE", "1")
    for leaf in leaves.values():
        leaf.grad = None
    named = {name: leaf for name, leaf in leaves.items() if name not in ("x", "weights")}
    experts = rx.ExpertWeights(**named)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = rx.run_experts(leaves["x"], inputs[1], leaves["weights"], experts, backend=BACKEND)
    pairs, item, slack = tokens * top_k, 2, 2**22
    result, product = tokens * hidden * item, pairs * 2 * inner * item
    kept = torch.cuda.memory_allocated() - before - result
    assert abs(kept - (0 if recompute else product)) < slack
    forward = result + pairs * (inner + hidden) * item + (0 if recompute else product)
    assert torch.cuda.max_memory_allocated() - before < forward + slack
    torch.cuda.reset_peak_memory_stats()
    out.backward(cotangent)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
    backward = result + product + pairs * (2 * inner + inner + hidden) * item + gradients
    assert torch.cuda.max_memory_allocated() - before < backward + 2 * slack


@pytest.mark.parametrize("changes", FLAGS, ids=str)
@pytest.mark.parametrize("tokens", [3, 300])
def test_a_training_step_in_a_graph(tokens, changes):
    """B72: forward, backward and the optimizer, captured once; replayed with other tokens and other routing."""
    x, index, weights, tensors, flags = built(tokens=tokens, **changes)
    leaves, static = leaves_of((x, index, weights), tensors), index.to(DEVICE)
    cotangent = torch.randn_like(leaves["x"])
    start = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    parameters = [leaf for name, leaf in leaves.items() if name not in ("x", "weights")]

    def whole():
        out = step(leaves, static, cotangent, flags)
        with torch.no_grad():
            for leaf in parameters:
                leaf -= 0.01 * leaf.grad
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = whole()
    captured = {name: leaf.grad for name, leaf in leaves.items()}
    for seed, routing in enumerate(("all here", "sentinels", "one expert", "all sentinels"), 1):
        fresh = built(seed, tokens=tokens, **changes, routing=routing)
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(start[name])
            leaves["x"].copy_(fresh[0])
            leaves["weights"].copy_(fresh[2])
            static.copy_(fresh[1])
        poison()
        graph.replay()
        again = {name: leaf_like(start[name], DEVICE) for name in leaves}
        with torch.no_grad():
            again["x"].copy_(fresh[0])
            again["weights"].copy_(fresh[2])
        wanted = step(again, static, cotangent, flags)
        assert torch.equal(out, wanted)
        for name, leaf in again.items():
            assert torch.equal(captured[name], leaf.grad), name
            if routing == "all sentinels":
                assert not leaf.grad.any()


@pytest.mark.parametrize("changes", FLAGS, ids=str)
def test_waits_for_nothing(changes):
    x, index, weights, tensors, flags = built(tokens=300, **changes)
    leaves, index = leaves_of((x, index, weights), tensors), index.to(DEVICE)
    cotangent = torch.randn_like(leaves["x"])
    step(leaves, index, cotangent, flags)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, index, cotangent, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert leaves["x"].grad.isfinite().all()


@pytest.mark.parametrize("changes", FLAGS, ids=str)
@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_other_ways_to_call_have_the_same_gradients(how, changes):
    torch.compiler.reset()
    dtype = torch.float32 if changes.get("gate") == "own" else torch.bfloat16  # inductor rounds a gate less often
    x, index, weights, tensors, flags = built(tokens=300, dtype=dtype, **changes)
    leaves, index = leaves_of((x, index, weights), tensors), index.to(DEVICE)
    cotangent = torch.randn_like(leaves["x"])
    ways = {
        "compiled": lambda f, *given: torch.compile(f, fullgraph=True)(*given),
        "checkpointed": lambda f, *given: checkpoint(f, *given, use_reentrant=False),
    }
    step(leaves, index, cotangent, flags)
    wanted = {name: leaf.grad for name, leaf in leaves.items()}
    poison()
    step(leaves, index, cotangent, flags, call=ways[how])
    for name, leaf in leaves.items():
        assert relative_error(leaf.grad, wanted[name].double()) < 1e-5, name


def test_main_gradients_are_added_to(monkeypatch):
    inputs, tensors = large(512, 8, 2, 1024, 512)
    leaves = leaves_of(inputs, tensors)
    cotangent = torch.randn_like(leaves["x"])
    step(leaves, inputs[1], cotangent, {})
    plain = {name: leaves[name].grad for name in tensors}
    monkeypatch.setenv("ROUTED_EXPERTS_MAIN_GRAD", "1")
    for name in tensors:
        leaves[name].main_grad = torch.ones(leaves[name].shape, device=DEVICE)
    for times in (1, 2):
        step(leaves, inputs[1], cotangent, {})
        for name, grad in plain.items():
            assert leaves[name].grad is None
            added = (leaves[name].main_grad - 1) / times
            assert (added - grad.float()).norm() <= 4e-3 * grad.float().norm()


def test_auto_trains_on_it_and_under_autocast():
    inputs, tensors = large(64, 16, 4, 1024, 512, torch.float32)
    leaves = leaves_of(inputs, tensors)
    experts = rx.ExpertWeights(**{name: leaves[name] for name in tensors})
    assert rx.select_backend(experts, num_tokens=64, num_top_k=4, training=True).name == BACKEND
    with torch.autocast(DEVICE, torch.bfloat16):
        out = run((leaves["x"], inputs[1], leaves["weights"]), experts)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert all(leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all() for leaf in leaves.values())


def test_example_trains_as_eager_does():
    example = Path(__file__).resolve().parent.parent / "examples" / "train_tiny_moe.py"
    command = [sys.executable, str(example), "--device", DEVICE, "--backends", "fused", "--steps", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
