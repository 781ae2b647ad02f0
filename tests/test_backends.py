"""Every row of the backend table against the float64 oracle: values and every gradient, on poisoned memory."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from cases import FACTORS, Case, build, full_grid, pairwise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, experts_oracle, relative_error
from torch import nn

import routed_experts as rx
from routed_experts import _core, selection
from routed_experts.backends.registry import REGISTRY
from routed_experts.facts import facts_for
from routed_experts.moe import Call, execute
from routed_experts.problem import problem_fields

PAIRWISE = pairwise()
NAMES = ("eager", "batched_mm", "grouped_mm")
HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)


def runnable_rows(experts, dtype, device):
    """Every row of the table, not only the cheapest of a name, that the core accepts for these experts."""
    facts = facts_for(torch.device(device)).to_dict()
    problem = selection._problem(problem_fields(experts), 4, (2, dtype, "auto", True, False, False, False, False))
    rows = []
    for spec, run in REGISTRY.table().rows:
        try:
            _core.Registry([spec.to_dict()]).select(facts, problem, spec.name)
        except rx.RoutedExpertsError:
            continue
        rows.append(SimpleNamespace(name=spec.name, path=spec.path, spec=spec, run=run))
    return rows


def run_all_rows(case, device="cpu", seed=0, slack=1, rows=None):
    """Compare forward and backward of every row (of ``rows``, if given) with the oracle; return those that ran."""
    x, index, weights, tensors, flags = build(case, seed)
    inputs = {"x": x, "weights": weights, **tensors}
    wanted, wanted_grads, cotangent, smooth = oracle_of(case, inputs, index, flags)
    ran = []
    probe = rx.ExpertWeights(**{name: t.to(device) for name, t in tensors.items()}, **flags)
    for row in runnable_rows(probe, case.dtype, device) if rows is None else rows:
        fresh = {name: leaf_like(t, device) for name, t in inputs.items()}
        ids = index.to(device)
        before = ids.clone()
        experts = rx.ExpertWeights(**{name: fresh[name] for name in tensors}, **flags)
        out = execute(row, Call(experts, fresh["x"], ids, fresh["weights"], case.dtype), case.weights_on)
        assert out.dtype == case.dtype
        assert out.shape == x.shape
        assert torch.equal(ids, before)
        assert relative_error(out.detach().cpu(), wanted) <= TOLERANCE[case.dtype], (row.name, row.path)
        with torch.no_grad():  # some rows go another way without gradients
            alone = execute(row, Call(experts, fresh["x"], ids, fresh["weights"], case.dtype), case.weights_on)
        assert relative_error(alone.cpu(), wanted) <= TOLERANCE[case.dtype], (row.name, row.path)
        out.backward(cotangent.to(device, case.dtype))
        for name, leaf in fresh.items():
            alone = 8 if case.tokens == 1 else 1  # one token: each gradient is one product, which can cancel
            check_gradient(row, name, leaf, wanted_grads[name], case.dtype, slack * alone if smooth else float("inf"))
        ran.append((row.name, row.path))
    return ran


def leaf_like(tensor, device):
    """A leaf of the same values and strides on the device."""
    return torch.empty_like(tensor, device=device).copy_(tensor).requires_grad_()


def check_gradient(row, name, leaf, wanted, dtype, slack):
    where = (row.name, row.path, name)
    assert leaf.grad is not None, where
    assert leaf.grad.dtype == leaf.dtype, where
    if name not in ("x", "weights") and leaf.grad.numel():
        assert leaf.grad.stride() == leaf.stride(), where
    few = 4 if leaf.numel() < 64 else 1  # the largest of a few dot products may itself be a cancelled one
    bound = 3 * slack * few * max(TOLERANCE[dtype], TOLERANCE[leaf.dtype])
    assert relative_error(leaf.grad.cpu(), wanted) <= bound, where


def oracle_of(case, inputs, index, flags):
    leaves = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    tensors = {name: leaf for name, leaf in leaves.items() if name not in ("x", "weights")}
    kinks = []
    wanted = experts_oracle(
        leaves["x"], index, leaves["weights"], tensors, flags, weights_on=case.weights_on, kinks=kinks
    )
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if wanted.requires_grad:
        cost = (wanted * cotangent.to(case.dtype)).sum()
        found = torch.autograd.grad(cost, list(leaves.values()), allow_unused=True)
        grads = [zero if grad is None else grad for zero, grad in zip(grads, found, strict=True)]
    # A value that rounds across a clamp has another gradient, and rightly so: then only its finiteness is checked.
    smooth = min(kinks, default=1.0) > 2 * TOLERANCE[case.dtype]
    return wanted.detach(), dict(zip(leaves, grads, strict=True)), cotangent, smooth


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_pair_of_factors(case, poisoned):
    poisoned()
    ran = run_all_rows(case)
    assert {name for name, _ in ran} == {*NAMES, *(["fused"] if case.dtype in HALVES_AND_FLOAT else [])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["clamped", "oai"])
def test_clamped_gradients_in_half_precision(gate, dtype):
    """Seeds whose values keep away from the clamp, so that the gradients on both sides of it are compared."""
    small = {"tokens": 6, "top_k": 1, "num_experts": 2, "sizes": (5, 3), "routing": "all here", "weights_on": "output"}
    case = dataclasses.replace(PAIRWISE[0], **small, gate=gate, dtype=dtype, bias=False, norm=False, strided=False)
    compared = 0
    for seed in range(40):
        x, index, weights, tensors, flags = build(case, seed)
        compared += oracle_of(case, {"x": x, "weights": weights, **tensors}, index, flags)[3]
        run_all_rows(case, seed=seed, slack=2)  # six dot products can cancel, and the largest is the scale
    assert compared >= 3


def test_pairs_are_covered():
    seen = {(a, getattr(c, a), b, getattr(c, b)) for c in PAIRWISE for a, b in itertools.combinations(FACTORS, 2)}
    wanted = {(a, x, b, y) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    assert wanted <= seen


def test_both_grouped_paths_ran():
    aligned = next(c for c in PAIRWISE if c.sizes == (8, 16) and c.dtype == torch.bfloat16 and c.tokens and c.top_k)
    assert {("grouped_mm", "torch"), ("grouped_mm", "loop")} <= set(run_all_rows(aligned))


@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.builds(Case, **{name: st.sampled_from(values) for name, values in FACTORS.items()}).filter(
        lambda case: case.tokens * case.top_k <= 200
    ),
    seed=st.integers(0, 2**16),
)
def test_samples_of_the_grid(case, seed):
    run_all_rows(case, seed=seed)


@pytest.mark.full_grid
@pytest.mark.parametrize("part", range(997))
@pytest.mark.timeout(600)
def test_full_grid(part):
    """A prime number of parts, so that each one meets every value of every factor."""
    for case in full_grid(part, 997):
        run_all_rows(case)


def test_a_broken_backend_fails_the_comparison():
    """B19: an output scaled by 1.05 is caught on unit-scale inputs, for the value and for every gradient."""
    case = next(c for c in PAIRWISE if c.tokens >= 17 and c.top_k >= 2 and c.routing == "all here")
    case = dataclasses.replace(case, dtype=torch.bfloat16, weights_dtype=None)
    x, index, weights, tensors, flags = build(case)
    inputs = {"x": x, "weights": weights, **tensors}
    wanted, wanted_grads, _, _ = oracle_of(case, inputs, index, flags)
    assert relative_error(1.05 * wanted, wanted) > TOLERANCE[torch.bfloat16]
    for grad in wanted_grads.values():
        assert relative_error(1.05 * grad, grad) > 3 * TOLERANCE[torch.bfloat16]
    broken = rx.ExpertWeights(**tensors | {"down_proj": tensors["down_proj"] * 1.05}, **flags)
    out = rx.run_experts(x, index, weights, broken, backend="grouped_mm", weights_on=case.weights_on)
    if flags.get("post_expert_norm") is None:
        assert relative_error(out, wanted) > TOLERANCE[torch.bfloat16]


def test_norm_runs_before_the_weight_and_for_each_pair():
    weights = rx.ExpertWeights(
        gate_up_proj=torch.randn(3, 10, 4),
        down_proj=torch.randn(3, 4, 5),
        post_expert_norm=nn.RMSNorm(4, eps=0.0),
    )
    out = rx.run_experts(torch.randn(1, 4), torch.tensor([[2]]), torch.tensor([[0.5]]), weights)
    torch.testing.assert_close(out.square().mean(), torch.tensor(0.25))


def paths_on(dtype=torch.bfloat16, hidden=64, **facts):
    weights = rx.ExpertWeights(
        gate_up_proj=torch.empty(4, 64, hidden, dtype=dtype, device="meta"),
        down_proj=torch.empty(4, hidden, 32, dtype=dtype, device="meta"),
    )
    machine = rx.current_facts("cpu").replace(**facts)
    return rx.select_backend(weights, num_tokens=64, backend="grouped_mm", facts=machine).path


@pytest.mark.parametrize(
    ("torch_version", "capability", "path"),
    [
        ("2.8.0", (9, 0), "torch"),
        ("2.8.0", (12, 0), "loop"),
        ("2.8.0", (8, 0), "loop"),
        ("2.9.1", (9, 0), "torch"),
        ("2.9.1", (8, 0), "torch"),
        ("2.9.1", (12, 0), "loop"),
        ("2.10.0", (8, 0), "torch"),
        ("2.10.0+cu130", (12, 0), "torch"),
        ("2.13.0", (7, 5), "loop"),
    ],
)
def test_grouped_path_by_torch_and_capability(torch_version, capability, path):
    """B64: a table of (torch, capability), never an inequality alone."""
    assert paths_on(torch=torch_version, capability=capability) == path


def test_grouped_path_needs_dtype_and_alignment_on_cuda():
    """B01 and B05: what the kernel does not take goes to the loop."""
    assert paths_on(torch=torch.__version__, capability=(9, 0), dtype=torch.float32) == "loop"
    assert paths_on(torch=torch.__version__, capability=(9, 0), hidden=63) == "loop"


def test_old_torch_on_a_cpu_loops():
    """B65."""
    assert paths_on(torch="2.8.0", device="cpu") == "loop"


def test_capture_needs_a_path_that_does_not_wait():
    """B72: the loop reads offsets on the host."""
    weights = rx.ExpertWeights(
        gate_up_proj=torch.empty(4, 64, 63, device="meta"), down_proj=torch.empty(4, 63, 32, device="meta")
    )
    facts = rx.current_facts("cpu").replace(capability=(9, 0), packages={})  # without Triton, so without fused
    with pytest.raises(rx.BackendUnavailable, match="captur"):
        rx.select_backend(weights, num_tokens=4, backend="grouped_mm", capturing=True, facts=facts)
    assert rx.select_backend(weights, num_tokens=4, capturing=True, facts=facts).name == "batched_mm"


def test_auto_never_copies_past_the_limit():
    """B35: 288 GiB of copies are predicted, and not chosen."""
    weights = rx.ExpertWeights(
        gate_up_proj=torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device="meta"),
        down_proj=torch.empty(128, 2048, 768, dtype=torch.bfloat16, device="meta"),
    )
    facts = rx.current_facts("cpu").replace(capability=(9, 0), packages={})  # without Triton, so without fused
    few = rx.select_backend(weights, num_tokens=1, num_top_k=8, facts=facts)
    many = rx.select_backend(weights, num_tokens=4096, num_top_k=8, facts=facts)
    assert few.name == "batched_mm"
    assert many.name != "batched_mm"
    hint = next(d.hint for d in many.decisions if d.backend == "batched_mm")
    assert "288" in hint or "GiB" in hint
