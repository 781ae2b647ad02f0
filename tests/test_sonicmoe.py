"""The sonicmoe backend over a faithful stand-in: its arguments, values, gradients and refusals."""

from __future__ import annotations

import warnings

import pytest
import torch
from external_experts import E, H, error_of, plain, routed
from external_fakes import ActivationType, FakeSonicMoe
from torch import nn
from torch.nn import functional as F

import routed_experts as rx
from routed_experts.backends import sonicmoe


@pytest.fixture
def kernel(monkeypatch):
    fake = FakeSonicMoe()
    rx.register_kernel("sonicmoe", fake)
    monkeypatch.setattr(sonicmoe, "_warned", [])
    yield fake
    rx.reset_kernels()


def eager(experts, x, ids, weights):
    return rx.run_experts(x, ids, weights, experts, backend="eager", expert_parallel=True)


@pytest.mark.parametrize(
    "flags",
    [{}, {"is_transposed": True}, {"is_concatenated": False}, {"bias": True}, {"activation": "relu"}],
    ids=lambda flags: "-".join(flags) or "plain",
)
def test_values_and_views(kernel, flags):
    experts, call = plain(**flags), routed(12, sentinels=True)
    got = sonicmoe.run(experts, *call)
    assert got.dtype == torch.bfloat16
    assert error_of(got, eager(experts, *call)) < 1e-2
    (made,) = kernel.calls
    # No copy of the weights.
    assert made["w1"].data_ptr() == experts.up_weight.data_ptr()
    assert made["w2"].data_ptr() == experts.down_weight.data_ptr()
    assert made["concat"] == experts.is_concatenated


def test_one_bias_alone_is_joined_by_zeros(kernel):
    whole = plain(bias=True)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        biases = {name: getattr(whole, name)}
        experts = rx.ExpertWeights(gate_up_proj=whole.gate_up_proj, down_proj=whole.down_proj, **biases)
        assert error_of(sonicmoe.run(experts, *routed(5)), eager(experts, *routed(5))) < 1e-2


def test_rows_nobody_owns_are_exactly_zero(kernel):
    x, ids, weights = routed(5)
    ids[1], ids[3], weights[1] = -1, E + 3, float("inf")
    got = sonicmoe.run(plain(), x, ids, weights)
    assert (got[[1, 3]] == 0).all()
    assert got[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_pairs_call_no_kernel(kernel, shape):
    x = torch.randn(shape[0], H).bfloat16().requires_grad_()
    experts = plain()
    got = sonicmoe.run(experts, x, torch.zeros(shape, dtype=torch.long), torch.zeros(shape, requires_grad=True))
    assert got.shape == (shape[0], H)
    got.sum().backward()
    assert (x.grad == 0).all()
    assert kernel.calls == []


def test_training_is_the_kernel_s_own(kernel):
    experts, (x, ids, weights) = plain(), routed(8, sentinels=True)
    leaves = (x, weights, experts.gate_up_proj, experts.down_proj)
    grads = []
    for run in (sonicmoe.run, eager):
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        run(experts, x, ids, weights).float().square().sum().backward()
        grads.append([leaf.grad.clone() for leaf in leaves])
    for got, wanted in zip(*grads, strict=True):
        assert error_of(got, wanted) < 2e-2
    outside = (ids < 0) | (ids >= E)
    assert (grads[0][1][outside] == 0).all()


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (nn.SiLU(), "SWIGLU"),
        (F.silu, "SWIGLU"),
        (nn.GELU(approximate="tanh"), "GEGLU"),
        ("gelu_pytorch_tanh", "GEGLU"),
        ("gelu_new", "GEGLU"),
        (nn.ReLU(), "REGLU"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_the_gate_is_that_of_the_module(kernel, act, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sonicmoe.run(plain(activation=act), *routed(3))
    assert kernel.calls[0]["type"] is ActivationType[kind]


def test_a_module_is_read_and_not_its_config(kernel):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            weights = plain()
            self.num_experts = E
            self.gate_up_proj = nn.Parameter(weights.gate_up_proj)
            self.down_proj = nn.Parameter(weights.down_proj)
            self.act_fn = nn.GELU(approximate="tanh")
            self.config = type("Config", (), {"hidden_act": "silu"})()

    with torch.no_grad():
        sonicmoe.run(rx.ExpertWeights.from_module(Experts()).bind(), *routed(3))
    assert kernel.calls[0]["type"] is ActivationType.GEGLU


def test_exact_gelu_is_approximated_by_name_and_said_once(kernel):
    experts, call = plain(activation="gelu"), routed(6)
    with pytest.warns(UserWarning, match="tanh approximation"):
        got = sonicmoe.run_approximated(experts, *call)
    assert kernel.calls[0]["type"] is ActivationType.GEGLU
    assert error_of(got, eager(experts, *call)) < 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sonicmoe.run_approximated(experts, *call)


@pytest.mark.parametrize(
    "flags",
    [
        {"swiglu_limit": 7.0},
        {"swiglu_alpha": 1.702},
        {"gate": lambda u: u.chunk(2, -1)[0]},
        {"gated": False, "activation": "relu2"},
        {"post_expert_norm": nn.Identity()},
        {"activation": "quick_gelu"},
        {"activation": lambda g: 7 * torch.tanh(g / 7)},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_gates_that_it_does_not_have_are_refused_before_a_load(kernel, flags):
    x, ids, weights = routed(3)
    with pytest.raises(rx.UnsupportedExperts) as caught:
        rx.run_experts(x, ids, weights, plain(**flags), backend="sonicmoe")
    assert isinstance(caught.value, ValueError)
    assert kernel.calls == []


def test_quantized_experts_are_refused(kernel):
    from external_experts import quantized

    x, ids, weights = routed(3)
    with pytest.raises(rx.UnsupportedScheme):
        rx.run_experts(x, ids, weights, quantized("fp8_block", (128, 128), False)[0], backend="sonicmoe")
