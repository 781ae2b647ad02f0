"""Faults that users of comparable systems met, by their number, where no other file holds the right value."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, experts_oracle, relative_error
from torch.utils.checkpoint import checkpoint

import routed_experts as rx

NAMES = ("eager", "batched_mm", "grouped_mm", "auto")


@pytest.fixture(params=NAMES)
def backend(request):
    return request.param


def make(experts=3, hidden=8, inner=6, dtype=torch.float32, grad=False):
    g = torch.Generator().manual_seed(0)
    tensors = {
        "gate_up_proj": torch.randn(experts, 2 * inner, hidden, generator=g) * hidden**-0.5,
        "down_proj": torch.randn(experts, hidden, inner, generator=g) * inner**-0.5,
    }
    tensors = {name: t.to(dtype).requires_grad_(grad) for name, t in tensors.items()}
    return rx.ExpertWeights(**tensors), tensors


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_b06_a_layout_is_int32_whatever_the_ids_are(dtype):
    layout = rx.build_layout(torch.tensor([[2, 0], [2, 1]], dtype=dtype), 3, alignment=2)
    assert [part.dtype for part in layout] == [torch.int32] * 8
    assert layout.offsets.tolist() == [1, 2, 4]


def test_b14_clamped_swiglu_far_outside_its_limit(backend):
    """The gate is clamped from above only, the linear half on both sides, and 1 is added to it."""
    weights = rx.ExpertWeights(
        gate_up_proj=torch.eye(2, dtype=torch.float64)[None],
        down_proj=torch.ones(1, 2, 1, dtype=torch.float64),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    )
    x = torch.cartesian_prod(*[torch.tensor([-20.0, 0.0, 20.0], dtype=torch.float64)] * 2)
    out = rx.run_experts(x, torch.zeros(9, 1, dtype=torch.long), torch.ones(9, 1), weights, backend=backend)
    gate, up = x[:, 0].clamp(max=7), x[:, 1].clamp(-7, 7)
    wanted = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    torch.testing.assert_close(out, wanted[:, None].expand(9, 2), rtol=1e-12, atol=0)
    assert out[8, 0].item() == pytest.approx(55.99962553, abs=1e-6)  # 8 * 7 * sigmoid(11.914)


def test_b25_minus_one_is_not_the_last_expert(backend):
    weights, tensors = make()
    x, index, w = normal(2, 8), torch.tensor([[0, -1], [2, 1]]), torch.tensor([[0.5, 0.5], [0.3, 0.7]])
    wanted = experts_oracle(x, index, w, tensors, {})
    assert relative_error(rx.run_experts(x, index, w, weights, backend=backend), wanted) < 1e-5
    last = experts_oracle(x, torch.tensor([[0, 2], [2, 1]]), w, tensors, {})
    assert relative_error(last, wanted) > 1e-2


def test_b26_an_id_past_the_end_reads_nothing(backend):
    """The weights are a view, and what lies behind them in memory is NaN: a read past the end would show."""
    _, tensors = make()
    padded = {name: torch.full((9, *t.shape[1:]), float("nan")) for name, t in tensors.items()}
    for name, t in tensors.items():
        padded[name][:3] = t
    weights = rx.ExpertWeights(**{name: t[:3] for name, t in padded.items()})
    x, index, w = normal(2, 8), torch.tensor([[8, 1], [3, 0]]), torch.ones(2, 2)
    out = rx.run_experts(x, index, w, weights, backend=backend)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < 1e-5
    with pytest.raises(rx.ExpertIndexError) as caught:
        rx.run_experts(x, index, w, weights, backend=backend, checked=True)
    assert caught.value.found == "top_k_index[0, 0] = 8"


@pytest.mark.parametrize("counts", [(4, 0, 4), (0, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b29_an_idle_expert_gets_a_gradient_of_exactly_zero(backend, counts, dtype, poisoned):
    poisoned()
    weights, tensors = make(hidden=16, inner=8, dtype=dtype, grad=True)
    index = torch.arange(3).repeat_interleave(torch.tensor(counts))[:, None]
    rx.run_experts(normal(8, 16).to(dtype), index, torch.ones(8, 1), weights, backend=backend).sum().backward()
    for tensor in tensors.values():
        for expert, count in enumerate(counts):
            assert (tensor.grad[expert].count_nonzero() == 0) == (count == 0)
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("hidden", [40, 264])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b31_the_last_partial_block_of_a_row_is_computed(backend, hidden, dtype, poisoned):
    poisoned()
    weights, tensors = make(hidden=hidden, inner=24, dtype=dtype)
    x, index, w = normal(5, hidden).to(dtype), torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
    out = rx.run_experts(x, index, w, weights, backend=backend)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[dtype]


def test_b37_padding_rows_are_labelled_and_hold_zeros():
    seen = []

    def run(experts, x, layout):
        seen.append((x.clone(), layout.row_expert))
        return torch.zeros_like(x)

    spec = rx.Spec(name="padded", takes="padded", gives="rows", alignment=4, auto=False)
    rx.register_backend("padded", run, spec=spec)
    try:
        x = torch.ones(3, 8)
        rx.run_experts(x, torch.tensor([[0, 1], [1, 1], [2, -1]]), torch.ones(3, 2), make()[0], backend="padded")
    finally:
        rx.unregister_backend("padded")
    rows, expert = seen[0]
    assert expert.tolist() == [0, -1, -1, -1, 1, 1, 1, -1, 2] + [-1] * 6
    assert torch.equal(rows, (expert >= 0).float()[:, None].expand_as(rows))


def test_b63_no_backend_named_is_the_default():
    weights, tensors = make()
    x, index, w = normal(4, 8), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    out = rx.run_experts(x, index, w, weights, backend=None)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < 1e-5


def test_b65_an_old_torch_on_a_cpu_takes_the_loop_to_the_same_value():
    weights, tensors = make(hidden=16, inner=8, dtype=torch.bfloat16)
    old = rx.current_facts("cpu").replace(torch="2.8.0")
    selection = rx.select_backend(weights, num_tokens=4, num_top_k=2, backend="grouped_mm", facts=old)
    assert (selection.name, selection.path) == ("grouped_mm", "loop")
    x, index, w = normal(4, 16).bfloat16(), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    layout = rx.build_layout(index, 3)
    rows = selection.run(weights, x.repeat_interleave(2, 0)[layout.order.long()], layout)
    out = rows[layout.inverse.long()].view(4, 2, 16).float().sum(1)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]


def test_b73_a_recomputed_layer_has_the_gradients_of_a_kept_one(backend):
    weights, tensors = make(grad=True)
    index, w = torch.tensor([[0, 1], [1, 1], [2, 0]]), torch.rand(3, 2)
    x = normal(3, 8).requires_grad_()

    def layer(x):
        return rx.run_experts(x, index, w, weights, backend=backend).square()

    leaves = (x, *tensors.values())
    kept = torch.autograd.grad(layer(x).sum(), leaves)
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(one, two) for one, two in zip(kept, again, strict=True))
