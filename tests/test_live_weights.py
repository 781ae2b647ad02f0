"""Weights made from a module: what it has at the time of the call, and no reason to keep it alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from oracle import experts_oracle, relative_error
from torch import nn

import routed_experts as rx
from routed_experts.errors import LayoutError

CALL = (torch.randn(5, 8), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))


class Owned(nn.Module):
    """Experts whose gate is a method of their own."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))

    def _apply_gate(self, u):
        return u[..., :6] * u[..., 6:].tanh()


@pytest.mark.parametrize("build", [lambda: rx.RoutedExperts(4, 8, 6), Owned], ids=["stock", "own gate"])
def test_a_module_that_ran_can_be_freed(build):
    module = build()
    rx.run_experts(*CALL, module).sum().backward()
    rx.select_backend(module, num_tokens=3)
    references = [weakref.ref(module), *(weakref.ref(parameter) for parameter in module.parameters())]
    gc.disable()  # counting references alone must do: collecting cycles comes too late for large weights
    try:
        del module
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_a_cast_of_the_module_is_seen():
    module = rx.RoutedExperts(4, 8, 6)
    weights = rx.ExpertWeights.from_module(module)
    rx.run_experts(*CALL, weights)
    module.to(torch.bfloat16)
    assert weights.dtype == torch.bfloat16
    assert rx.select_backend(weights, num_tokens=3).request.startswith("T=3 K=2 E=4 H=8 I=6 bfloat16")
    assert rx.run_experts(CALL[0].bfloat16(), *CALL[1:], weights).dtype == torch.bfloat16
    with pytest.raises(rx.DtypeError):
        rx.run_experts(*CALL, weights)


def test_another_parameter_is_read_and_checked():
    module = rx.RoutedExperts(4, 8, 6)
    weights = rx.ExpertWeights.from_module(module)
    module.down_proj = nn.Parameter(torch.zeros(4, 8, 6))
    assert rx.run_experts(*CALL, weights).count_nonzero() == 0
    module.down_proj = nn.Parameter(torch.zeros(4, 6, 8))
    with pytest.raises(LayoutError, match="declared layout"):
        rx.run_experts(*CALL, weights)


def test_another_activation_is_read():
    module = rx.RoutedExperts(4, 8, 6)
    weights = rx.ExpertWeights.from_module(module)
    rx.run_experts(*CALL, weights)
    module.act_fn = nn.ReLU()
    wanted = experts_oracle(*CALL, dict(module.named_parameters()), {"activation": "relu"})
    for experts in (weights, module):
        assert relative_error(rx.run_experts(*CALL, experts).detach(), wanted.detach()) < 1e-5
    assert weights.activation_name == "relu"


def test_weights_of_no_shard_say_so():
    assert rx.ExpertWeights.from_module(rx.RoutedExperts(4, 8, 6)).shard == None  # noqa: E711
    assert rx.ExpertWeights(gate_up_proj=torch.ones(1, 2, 2), down_proj=torch.ones(1, 2, 1)).shard == None  # noqa: E711
    with pytest.raises(AttributeError, match="no attribute 'sharded'"):
        _ = rx.ExpertWeights.from_module(rx.RoutedExperts(4, 8, 6)).sharded


def test_what_is_no_experts_is_refused():
    for thing in (None, object(), [1]):
        with pytest.raises(LayoutError) as caught:
            rx.select_backend(thing, num_tokens=3)
        assert caught.value.found == type(thing).__name__
