"""Gradients through quantized experts, what is refused of them, and torch.compile."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, experts_oracle, relative_error
from quantized_cases import BACKENDS, LAYOUTS, SCHEMES, name_of, quantized, routed
from quantized_oracle import tensors_of
from torch._dynamo.testing import CompileCounterWithBackend

import routed_experts as rx

PLAIN = [(scheme, False, True, True, True) for scheme in SCHEMES]
TURNED = [layout for layout in LAYOUTS if layout[1] and layout[3]][::3]
SOME = [PLAIN[0], PLAIN[5], PLAIN[7]]


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def gradients(run, x, weights, biases, upstream):
    out = run(x, weights)
    return torch.autograd.grad(out, (x, weights, *biases), upstream.to(out.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [*PLAIN, *TURNED], ids=name_of)
def test_gradients_of_inputs_weights_and_biases(layout, backend, poisoned):
    experts, _, flags = quantized(layout)
    x, index, weights = routed(sentinels=True)
    names = [name for name in ("gate_up_proj_bias", "down_proj_bias") if getattr(experts, name) is not None]
    biases = [getattr(experts, name).requires_grad_() for name in names]
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    x, weights = leaves(x, weights)
    poisoned()
    got = gradients(lambda x, w: rx.run_experts(x, index, w, experts, backend=backend), x, weights, biases, upstream)
    double = [*leaves(x.detach().double(), weights.detach().double())]
    wide = leaves(*(bias.detach().double() for bias in biases))
    tensors = {**tensors_of(experts), **dict(zip(names, wide, strict=True))}
    wanted = gradients(lambda x, w: experts_oracle(x, index, w, tensors, flags), *double, wide, upstream)
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 2e-5
    gone = (index < 0) | (index >= experts.num_experts)
    assert gone.any()
    assert (got[1][gone] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", SOME, ids=name_of)
def test_gradients_in_bfloat16(layout, backend):
    experts, _, flags = quantized(layout)
    x, index, weights = routed(dtype=torch.bfloat16)
    x, weights = leaves(x, weights)
    upstream = torch.ones(x.shape)
    got = gradients(lambda x, w: rx.run_experts(x, index, w, experts, backend=backend), x, weights, (), upstream)
    assert [grad.dtype for grad in got] == [torch.bfloat16, torch.float32]
    double = leaves(x.detach().double(), weights.detach().double())
    wanted = gradients(lambda x, w: experts_oracle(x, index, w, tensors_of(experts), flags), *double, (), upstream)
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (4, 2)])
def test_nothing_to_run_stays_in_the_graph(tokens, top_k, backend):
    experts, _, _ = quantized(PLAIN[0])
    x, index, weights = routed(tokens, top_k)
    x, weights = leaves(x, weights)
    out = rx.run_experts(x, torch.full_like(index, -1), weights, experts, backend=backend)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert not x.grad.any()
    assert not weights.grad.any()


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv", "gate_up_proj", "down_proj"])
def test_a_gradient_of_what_is_quantized_is_refused(name, backend, monkeypatch):
    experts, _, _ = quantized(PLAIN[0])
    x, index, weights = routed()
    call = (x.requires_grad_(), index, weights, experts)
    rx.run_experts(*call, backend=backend)  # a call like it that is remembered
    getattr(experts, name).requires_grad_()

    def ran(*_, **__):
        raise AssertionError("something ran")

    monkeypatch.setattr("routed_experts.moe.execute", ran)
    with pytest.raises(rx.GradientUnsupported, match=name) as caught:
        rx.run_experts(*call, backend=backend)
    assert "requires_grad_(False)" in caught.value.hint
    monkeypatch.undo()
    with torch.no_grad():
        rx.run_experts(*call, backend=backend)


@pytest.mark.parametrize(
    ("layout", "backend", "grad"),
    [(SOME[0], "batched_mm", False), (SOME[1], "grouped_mm", True), (SOME[2], "batched_mm", True)]
    + [(layout, "auto", grad) for layout in SOME for grad in (False, True)]
    + [(SOME[2], "eager", False)],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else str(value),
)
def test_compiled(layout, backend, grad):
    torch.compiler.reset()
    experts, _, flags = quantized(layout)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, index, w: rx.run_experts(x, index, w, experts, backend=backend),
        backend=counter,
        fullgraph=backend != "eager",
    )
    for tokens in (2,) if backend == "eager" else (2, 3, 5):
        x, index, weights = routed(tokens, sentinels=True)
        if grad:
            x, weights = leaves(x, weights)
        out = compiled(x, index, weights)
        wanted = experts_oracle(x.detach(), index, weights.detach(), tensors_of(experts), flags)
        assert relative_error(out.detach(), wanted) < 1e-5
        if grad:
            plain = torch.autograd.grad(
                rx.run_experts(x, index, weights, experts, backend="grouped_mm").sum(), (x, weights)
            )
            for one, other in zip(torch.autograd.grad(out.sum(), (x, weights)), plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if backend != "eager":
        assert counter.frame_count <= 2
