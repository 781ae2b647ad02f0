"""run_experts: the contract's worked numbers, sentinels, dtypes and promises."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import RUNNABLE, inputs, make
from oracle import TOLERANCE, experts_oracle, relative_error

import routed_experts as rx
from routed_experts.products import copies


def test_tiny_exact_case(backend):
    weights = rx.ExpertWeights(
        gate_up_proj=torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [1.0, 1.0]]]),
        down_proj=torch.tensor([[[1.0], [-1.0]], [[5.0], [5.0]]]),
        activation="relu",
    )
    x, w = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.5]])
    assert rx.run_experts(x, torch.tensor([[0, 1]]), w, weights, backend=backend).tolist() == [[1.0, -1.0]]
    assert rx.run_experts(x, torch.tensor([[0, 0]]), w, weights, backend=backend).tolist() == [[2.0, -2.0]]


@pytest.fixture(params=RUNNABLE)
def backend(request):
    return request.param


OAI = {
    (1.0, 2.0): 2.537387297798464,
    (10.0, -9.0): -41.99971876981991,
    (-10.0, 8.0): -3.2463690358842494e-06,
    (12.0, -11.0): -41.99971876981991,
    (-12.0, 11.0): -1.29491342686781e-07,
}
CLAMPED = {
    (1.0, 2.0): 1.4621171572600098,
    (10.0, -9.0): -89.99591419181678,
    (-10.0, 8.0): -0.003631829496194751,
    (12.0, -11.0): -99.99546021312976,
    (-12.0, 11.0): -0.0007373009522657661,
}


@pytest.mark.parametrize(("flags", "table"), [
    ({"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, OAI),
    ({"swiglu_limit": 10.0}, CLAMPED),
])  # fmt: skip
@pytest.mark.parametrize("is_concatenated", [True, False])
def test_gate_numbers(backend, flags, table, is_concatenated):
    weights = rx.ExpertWeights(
        gate_up_proj=torch.eye(2, dtype=torch.float64)[None],
        down_proj=torch.ones(1, 2, 1, dtype=torch.float64),
        is_concatenated=is_concatenated,
        **flags,
    )
    for (gate, up), wanted in table.items():
        x = torch.tensor([[gate, up]], dtype=torch.float64)
        out = rx.run_experts(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), weights, backend=backend)
        torch.testing.assert_close(out, torch.full((1, 2), wanted, dtype=torch.float64), rtol=1e-12, atol=0)


def test_limit_zero_is_a_limit(backend):
    weights, _ = make(swiglu_limit=0.0)
    x, index, w = inputs()
    assert rx.run_experts(x, index, w, weights, backend=backend).abs().max() == 0


def test_interleaved_is_not_concatenated(backend):
    """B13: gate rows all 1, up rows all 2, interleaved."""
    up = torch.tensor([1.0, 2.0]).repeat(4)[None, :, None].expand(2, 8, 8).contiguous()
    weights = rx.ExpertWeights(gate_up_proj=up, down_proj=torch.ones(2, 8, 4), is_concatenated=False)
    x = torch.full((1, 8), 0.125)
    wanted = 4 * torch.nn.functional.silu(torch.tensor(1.0)) * 2
    out = rx.run_experts(x, torch.tensor([[1]]), torch.ones(1, 1), weights, backend=backend)
    torch.testing.assert_close(out, wanted.expand(1, 8))


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("tokens", [0, 3])
def test_empty_calls_stay_in_the_graph(backend, tokens, top_k):
    if tokens and top_k:
        pytest.skip("not an empty call")
    weights, tensors = make(grad=True, dtype=torch.bfloat16)
    x = torch.randn(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.rand(tokens, top_k, requires_grad=True)
    out = rx.run_experts(x, torch.zeros(tokens, top_k, dtype=torch.long), w, weights, backend=backend)
    assert out.shape == (tokens, 8)
    assert out.dtype == torch.bfloat16
    assert out.requires_grad
    out.sum().backward()
    for leaf in (x, w, *tensors.values()):
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.count_nonzero() == 0


@pytest.mark.parametrize("flag", [True, False])
def test_sentinels_contribute_exactly_zero(backend, flag, poisoned):
    poisoned()
    weights, tensors = make(grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    index = torch.tensor([[0, -1], [4, 2], [-1, 900], [3, 3]])
    w = torch.tensor([[0.5, float("nan")], [float("inf"), 1.0], [3.0, 2.0], [0.25, 0.75]], requires_grad=True)
    out = rx.run_experts(x, index, w, weights, backend=backend, expert_parallel=flag)
    clean = torch.where((index >= 0) & (index < 4), w, 0).detach()
    torch.testing.assert_close(out.double(), experts_oracle(x, index, clean, tensors, {}), atol=1e-6, rtol=1e-5)
    assert torch.equal(out[2], torch.zeros(8))
    out.sum().backward()
    assert torch.equal(x.grad[2], torch.zeros(8))
    assert w.grad[[0, 1, 2, 2], [1, 0, 0, 1]].tolist() == [0, 0, 0, 0]
    for leaf in (x, w, *tensors.values()):
        assert leaf.grad.isfinite().all()
    assert tensors["down_proj"].grad[1].count_nonzero() == 0


def test_infinite_token_of_sentinels_stays_zero(backend):
    weights, tensors = make(grad=True)
    x = torch.full((2, 8), float("inf"))
    x[1] = 1.0
    x.requires_grad_()
    out = rx.run_experts(x, torch.tensor([[4, 7], [0, 1]]), torch.ones(2, 2), weights, backend=backend)
    assert torch.equal(out[0], torch.zeros(8))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, *tensors.values()))


def test_per_slot_weights_when_k_is_e(backend):
    """B23: weights belong to slots, not to expert numbers."""
    weights, tensors = make(experts=2)
    x, index = torch.randn(2, 8), torch.tensor([[1, 0], [1, 0]])
    w = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    out = rx.run_experts(x, index, w, weights, backend=backend)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < 1e-5


def test_repeated_expert_counts_twice(backend):
    weights, _ = make()
    x = torch.randn(1, 8)
    twice = rx.run_experts(x, torch.tensor([[2, 2]]), torch.tensor([[0.3, 0.6]]), weights, backend=backend)
    once = rx.run_experts(x, torch.tensor([[2]]), torch.tensor([[0.9]]), weights, backend=backend)
    torch.testing.assert_close(twice, once)


def test_weights_on_input(backend):
    """B17: silu(0.5 x) is not 0.5 silu(x)."""
    weights, tensors = make()
    x, index, _ = inputs(top_k=1)
    w = torch.full((5, 1), 0.5)
    wanted = experts_oracle(x, index, w, tensors, {}, weights_on="input")
    out = rx.run_experts(x, index, w, weights, backend=backend, weights_on="input")
    assert relative_error(out, wanted) < 1e-5
    assert relative_error(rx.run_experts(x, index, w, weights, backend=backend), wanted) > 1e-2


def test_negative_and_zero_weights_have_gradients(backend):
    """B11: no identity that divides by the routing weight."""
    weights, tensors = make()
    x, index = torch.randn(2, 8), torch.tensor([[0, 1], [2, 3]])
    w = torch.tensor([[-0.5, 0.0], [0.3, 0.7]], requires_grad=True)
    rx.run_experts(x, index, w, weights, backend=backend).sum().backward()
    reference = w.detach().double().requires_grad_()
    experts_oracle(x, index, reference, tensors, {}).sum().backward()
    assert relative_error(w.grad, reference.grad) < 1e-5


def test_float32_routing_weights_beside_bfloat16(backend):
    """B12: output keeps the tokens' dtype and the sum runs in float32."""
    weights, tensors = make(hidden=64, inner=32, dtype=torch.bfloat16)
    x, index, w = inputs(tokens=33, top_k=4, hidden=64, dtype=torch.bfloat16)
    out = rx.run_experts(x, index, w, weights, backend=backend)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_ids(backend, dtype):
    weights, _ = make()
    x, index, w = inputs()
    wanted = rx.run_experts(x, index, w, weights, backend="eager")
    torch.testing.assert_close(rx.run_experts(x, index.to(dtype), w, weights, backend=backend), wanted)


def test_inputs_are_not_changed(backend):
    weights, _ = make()
    x, index, w = inputs()
    index[0, 0] = -1
    copies = [t.clone() for t in (x, index, w)]
    rx.run_experts(x, index, w, weights, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip((x, index, w), copies, strict=True))


def test_gradcheck_in_float64(backend):
    """B04."""
    _, tensors = make(experts=3, hidden=4, inner=3, dtype=torch.float64, grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 2], [2, 2], [1, -1]])

    def call(x, w, gate_up_proj, down_proj):
        experts = rx.ExpertWeights(gate_up_proj=gate_up_proj, down_proj=down_proj)
        return rx.run_experts(x, index, w, experts, backend=backend)

    assert torch.autograd.gradcheck(call, (x, w, *tensors.values()))


@pytest.mark.parametrize(("hidden", "inner"), [(6, 5), (1025, 3)])
def test_widths_that_a_grouped_kernel_refuses(backend, hidden, inner):
    """B01: rows of 12 and 10 bytes."""
    weights, tensors = make(hidden=hidden, inner=inner, dtype=torch.bfloat16, grad=True)
    x, index, w = inputs(tokens=9, hidden=hidden, dtype=torch.bfloat16)
    out = rx.run_experts(x, index, w, weights, backend=backend)
    assert relative_error(out.detach(), experts_oracle(x, index, w, tensors, {}).detach()) < TOLERANCE[torch.bfloat16]
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors.values())


def test_expanded_tokens_and_gradient(backend):
    """B07: stride 0 in, and a gradient of stride 0 from sum()."""
    weights, _ = make(hidden=16, inner=8, grad=True)
    row = torch.randn(16, requires_grad=True)
    index, w = torch.randint(0, 4, (8, 2)), torch.rand(8, 2)
    rx.run_experts(row.expand(8, 16), index, w, weights, backend=backend).sum().backward()
    got = row.grad.clone()
    dense = row.detach().expand(8, 16).contiguous().requires_grad_()
    rx.run_experts(dense, index, w, weights, backend="eager").sum().backward()
    torch.testing.assert_close(got, dense.grad.sum(0), atol=1e-4, rtol=1e-4)


def test_views_of_wider_buffers(backend):
    """B08 and B10: odd row pitch, and a base address that is not a multiple of 16."""
    torch.manual_seed(0)
    up = torch.randn(2, 64, 20, dtype=torch.bfloat16)[:, :, :16]
    down = torch.randn(2 * 16 * 32 + 1, dtype=torch.bfloat16)[1:].view(2, 16, 32)
    x = torch.randn(8, 33, dtype=torch.bfloat16)[:, :16]
    index, w = torch.randint(0, 2, (8, 2)), torch.rand(8, 2)
    views = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    dense = {"gate_up_proj": up.contiguous(), "down_proj": down.clone()}
    wanted = experts_oracle(x, index, w, dense, {})
    got = rx.run_experts(x, index, w, views, backend=backend)
    assert relative_error(got, wanted) < TOLERANCE[torch.bfloat16]


def test_expert_expanded_weights(backend):
    up = torch.randn(1, 12, 8).requires_grad_()
    weights = rx.ExpertWeights(gate_up_proj=up.expand(4, 12, 8), down_proj=torch.randn(4, 8, 6))
    x, index, w = inputs()
    rx.run_experts(x, index, w, weights, backend=backend).sum().backward()
    assert up.grad.shape == up.shape
    assert up.grad.isfinite().all()


def test_transposed_view_as_parameter(backend):
    """B09: gradients land in the parameter's own layout."""
    stored = torch.randn(4, 8, 12).requires_grad_()
    weights = rx.ExpertWeights(gate_up_proj=stored.transpose(1, 2), down_proj=torch.randn(4, 8, 6))
    x, index, w = inputs()
    rx.run_experts(x, index, w, weights, backend=backend).sum().backward()
    assert stored.grad.stride() == stored.stride()
    reference = stored.detach().double().requires_grad_()
    tensors = {"gate_up_proj": reference.transpose(1, 2), "down_proj": weights.down_proj}
    experts_oracle(x, index, w, tensors, {}).sum().backward()
    assert relative_error(stored.grad, reference.grad) < 1e-5


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_autocast(backend, weights_dtype):
    """B02 and B03: float32 rows under bfloat16 autocast, forward and backward."""
    weights, tensors = make(hidden=16, inner=8, dtype=weights_dtype, grad=True)
    x, index, w = inputs(hidden=16)
    x.requires_grad_()
    w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = rx.run_experts(x, index, w, weights, backend=backend)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert relative_error(out.detach(), experts_oracle(x, index, w, tensors, {}).detach()) < TOLERANCE[torch.bfloat16]
    for leaf in (x, w, *tensors.values()):
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.isfinite().all()


def test_deterministic_mode_and_bits(backend):
    """B33 and B34: no op that deterministic mode refuses, and equal bits run to run."""
    weights, tensors = make(experts=8, hidden=64, inner=32, dtype=torch.bfloat16, grad=True)
    x, index, w = inputs(tokens=200, top_k=8, experts=8, hidden=64, dtype=torch.bfloat16)
    x.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        seen = []
        for _ in range(5):
            x.grad = None
            for t in tensors.values():
                t.grad = None
            out = rx.run_experts(x, index, w, weights, backend=backend)
            out.float().sum().backward()
            seen.append([out.detach(), x.grad, *(t.grad for t in tensors.values())])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in seen[1:] for a, b in zip(seen[0], run, strict=True))


def test_permuted_tokens_permute_rows(backend):
    weights, _ = make()
    x, index, w = inputs(tokens=40)
    order = torch.randperm(40)
    out = rx.run_experts(x, index, w, weights, backend=backend)
    moved = rx.run_experts(x[order], index[order], w[order], weights, backend=backend)
    assert relative_error(moved, out[order].double()) < 1e-6


def test_batched_copies_stay_in_the_budget(monkeypatch, caplog):
    """B35: chunks under the stated bytes, announced before the copies are made."""
    weights, tensors = make(hidden=16, inner=8, grad=True)
    x, index, w = inputs(tokens=9, hidden=16)
    largest = []
    original = copies._copies

    def spy(weight, expert):
        taken = original(weight, expert)
        largest.append(taken.numel() * taken.element_size())
        return taken

    monkeypatch.setattr(copies, "_copies", spy)
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "3000")
    with caplog.at_level("INFO", logger="routed_experts"):
        out = rx.run_experts(x, index, w, weights, backend="batched_mm")
        out.sum().backward()
    assert largest
    assert max(largest) <= 3000
    assert "18 expert matrices" in caplog.text
    assert relative_error(out.detach(), experts_oracle(x, index, w, tensors, {}).detach()) < 1e-5


@pytest.mark.parametrize("text", ["-1", "much", "1e9"])
def test_bad_budget_is_refused(monkeypatch, text):
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", text)
    with pytest.raises(rx.LayoutError, match="ROUTED_EXPERTS_BATCHED_BYTES"):
        rx.run_experts(*inputs(), make()[0], backend="batched_mm")


def test_checkpoint_recompute_with_other_routing(backend):
    """B73: the number and shapes of saved tensors do not depend on the routing."""
    if backend == "eager":
        pytest.skip("eager saves one set a hit expert, which is documented")
    from torch.utils.checkpoint import checkpoint

    weights, _ = make(grad=True)
    x, index, w = inputs(tokens=6)
    x.requires_grad_()
    calls = []

    def layer(x):
        nudged = index.roll(len(calls)) if calls else index.clone()
        nudged[0, 0] = -1 if calls else nudged[0, 0]
        calls.append(1)
        return rx.run_experts(x, nudged, w, weights, backend=backend)

    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2
    assert x.grad.isfinite().all()
