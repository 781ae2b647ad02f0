"""Backends of a user's own, one for every form that a spec can take and give, against the oracle."""

from __future__ import annotations

import pytest
import torch
from oracle import experts_oracle, relative_error
from torch.nn import functional as F

import routed_experts as rx
from routed_experts.errors import DtypeError, LayoutError

NAME = "mine"


def run_pairs(experts, x, expert_R):
    """Every row through its expert, one by one; -1 gives 0."""
    rows = [torch.full((0, x.shape[1]), 0.0)]
    for row, expert in zip(x, expert_R.tolist(), strict=True):
        gate, up = (row[None] @ experts.up_weight[expert].mT).chunk(2, -1)
        out = (F.silu(gate) * up) @ experts.down_weight[expert].mT
        rows.append(out if expert >= 0 else torch.zeros_like(out))
    return torch.cat(rows)


def run_grouped(experts, x, layout):
    expert = torch.searchsorted(layout.offsets, torch.arange(len(x), dtype=torch.int32), right=True)
    return run_pairs(experts, x, torch.where(expert < experts.num_experts, expert, -1))


def run_grouped_to_slots(experts, x, layout):
    return run_grouped(experts, x, layout)[layout.inverse.long()]


def run_padded(experts, x, layout):
    return run_pairs(experts, x, layout.row_expert)


def run_padded_to_slots(experts, x, layout):
    rows = run_padded(experts, x, layout)
    expert = torch.searchsorted(layout.offsets, layout.inverse, right=True).clamp(max=experts.num_experts - 1)
    padded_row = layout.inverse - (layout.offsets - layout.counts)[expert] + layout.starts[expert]
    return rows[padded_row.clamp(max=len(rows) - 1).long()]


def run_routing_to_slots(experts, x, index, weights):
    expert = torch.where((index >= 0) & (index < experts.num_experts), index, -1)
    return run_pairs(experts, x.repeat_interleave(index.shape[1], 0), expert.reshape(-1))


def run_routing(experts, x, index, weights):
    return rx.run_experts(x, index, weights, experts, backend="eager")


FORMS = [
    ("routing", "tokens", 1, run_routing),
    ("routing", "slots", 1, run_routing_to_slots),
    ("slots", "slots", 1, run_pairs),
    ("slots", "rows", 1, run_pairs),
    ("grouped", "rows", 1, run_grouped),
    ("grouped", "slots", 1, run_grouped_to_slots),
    ("padded", "rows", 2, run_padded),
    ("padded", "rows", 128, run_padded),
    ("padded", "slots", 4, run_padded_to_slots),
]


@pytest.fixture
def register():
    yield lambda fn, **spec: rx.register_backend(NAME, fn, spec=rx.Spec(name=NAME, auto=False, **spec))
    if NAME in rx.backends():
        rx.unregister_backend(NAME)


def make():
    g = torch.Generator().manual_seed(0)
    tensors = {"gate_up_proj": torch.randn(4, 12, 8, generator=g), "down_proj": torch.randn(4, 8, 6, generator=g)}
    tensors = {name: (t * 0.3).requires_grad_() for name, t in tensors.items()}
    return rx.ExpertWeights(**tensors), tensors


@pytest.mark.parametrize(("takes", "gives", "alignment", "fn"), FORMS)
@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_every_form(register, takes, gives, alignment, fn, weights_on):
    register(fn, takes=takes, gives=gives, alignment=alignment)
    experts, tensors = make()
    g = torch.Generator().manual_seed(1)
    index = torch.randint(0, 4, (7, 3), generator=g)
    index[0], index[2, 1] = torch.tensor([-1, 4, 9]), -5
    x, w = torch.randn(7, 8, generator=g).requires_grad_(), torch.rand(7, 3, generator=g).requires_grad_()
    out = rx.run_experts(x, index, w, experts, backend=NAME, weights_on=weights_on)
    double = [t.detach().double().requires_grad_() for t in (x, w, *tensors.values())]
    named = dict(zip(tensors, double[2:], strict=True))
    wanted = experts_oracle(double[0], index, double[1], named, {}, weights_on=weights_on)
    assert relative_error(out.detach(), wanted.detach()) < 1e-5
    assert out[0].count_nonzero() == 0
    grads = torch.autograd.grad(out.sum(), (x, w))
    for grad, right in zip(grads, torch.autograd.grad(wanted.sum(), double[:2]), strict=True):
        assert relative_error(grad, right) < 2e-5


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"takes": "pairs"}, "takes"),
        ({"gives": "sums"}, "gives"),
        ({"takes": "slots", "gives": "tokens"}, "gives"),
        ({"takes": "routing", "gives": "rows"}, "gives"),
        ({"takes": "padded", "gives": "rows"}, "alignment"),
        ({"alignment": 0}, "alignment"),
        ({"devices": "cpu"}, "devices"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(spec, name):
    with pytest.raises(LayoutError) as caught:
        rx.Spec(name=NAME, **spec)
    assert name in caught.value.message
    assert caught.value.needed


def test_a_spec_is_no_dict():
    with pytest.raises(DtypeError):
        rx.register_backend(NAME, run_routing, spec={"name": NAME})
    assert NAME not in rx.backends()


@pytest.mark.parametrize(("takes", "gives"), [("routing", "tokens"), ("slots", "slots"), ("grouped", "rows")])
@pytest.mark.parametrize("result", [None, torch.zeros(3, 8), torch.zeros(7, 9)])
def test_a_result_of_another_shape_is_refused(register, takes, gives, result):
    register(lambda *_: result, takes=takes, gives=gives)
    with pytest.raises(LayoutError, match=NAME) as caught:
        rx.run_experts(torch.ones(7, 8), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2), make()[0], backend=NAME)
    assert gives in caught.value.needed
