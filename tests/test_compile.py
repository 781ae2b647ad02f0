"""torch.compile: the table of modes, dtypes and fullgraph, recompiles over token counts, and what is in the graph."""

from __future__ import annotations

import pytest
import torch
from oracle import TOLERANCE, experts_oracle, relative_error
from torch._dynamo.testing import CompileCounterWithBackend

import routed_experts as rx

MODES = (None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TABLE = {
    "grouped_mm": ((None, "max-autotune-no-cudagraphs"), True),
    "batched_mm": (MODES, True),
    "eager": (MODES, False),
    "auto": (MODES, True),
}
CELLS = [(name, mode, dtype, full) for name, (modes, full) in TABLE.items() for mode in modes for dtype in DTYPES]

EXPERTS, HIDDEN, INNER = 4, 16, 8


def own_gate(up):
    return torch.tanh(up[..., :INNER]) * up[..., INNER:]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def make(dtype=torch.float32, *, grad=False, **flags):
    g = torch.Generator().manual_seed(0)
    tensors = {
        "gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) * HIDDEN**-0.5,
        "down_proj": torch.randn(EXPERTS, HIDDEN, INNER, generator=g) * INNER**-0.5,
    }
    tensors = {name: t.to(dtype).requires_grad_(grad) for name, t in tensors.items()}
    return rx.ExpertWeights(**tensors, **flags), tensors


def inputs(tokens=5, dtype=torch.float32, seed=1):
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, EXPERTS + 1, (tokens, 2), generator=g)
    return torch.randn(tokens, HIDDEN, generator=g).to(dtype), index, torch.rand(tokens, 2, generator=g)


@pytest.mark.parametrize(("backend", "mode", "dtype", "fullgraph"), CELLS, ids=str)
def test_table(backend, mode, dtype, fullgraph):
    weights, tensors = make(dtype)
    x, index, w = inputs(dtype=dtype)
    compiled = torch.compile(
        lambda x, index, w: rx.run_experts(x, index, w, weights, backend=backend),
        mode=mode,
        fullgraph=fullgraph,
    )
    with torch.no_grad():
        out = compiled(x, index, w)
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "flags", [{}, {"gate": lambda u: torch.tanh(u[..., :INNER]) * u[..., INNER:]}], ids=["silu", "own"]
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm"])
def test_at_most_one_recompile(backend, grad, flags):
    """B71: T = 1..12 costs at most two compilations, forward and backward."""
    weights, tensors = make(grad=grad, **flags)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, index, w: rx.run_experts(x, index, w, weights, backend=backend),
        backend=counter,
        fullgraph=True,
    )
    for tokens in range(1, 13):
        x, index, w = inputs(tokens)
        x.requires_grad_(grad)
        out = compiled(x, index, w)
        reference = [t.detach().double().requires_grad_() for t in (x, *tensors.values())]
        wanted = experts_oracle(reference[0], index, w, dict(zip(tensors, reference[1:], strict=True)), flags)
        assert relative_error(out.detach(), wanted.detach()) < 1e-5
        if grad:
            out.sum().backward()
            wanted.sum().backward()
            for leaf, double in zip((x, *tensors.values()), reference, strict=True):
                assert relative_error(leaf.grad, double.grad) < 2e-5
                leaf.grad = None
    assert counter.frame_count <= 2


def test_no_tokens():
    weights, _ = make()
    compiled = torch.compile(lambda x, i, w: rx.run_experts(x, i, w, weights), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(*inputs(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm"])
def test_inductor_trains(backend):
    weights, tensors = make(grad=True)
    x, index, w = inputs(7)
    x.requires_grad_()
    compiled = torch.compile(lambda x, index, w: rx.run_experts(x, index, w, weights, backend=backend), fullgraph=True)
    compiled(x, index, w).sum().backward()
    got = [t.grad for t in (x, *tensors.values())]
    reference = [t.detach().double().requires_grad_() for t in (x, *tensors.values())]
    experts_oracle(reference[0], index, w, dict(zip(tensors, reference[1:], strict=True)), {}).sum().backward()
    for grad, double in zip(got, reference, strict=True):
        assert relative_error(grad, double.grad) < 2e-5


def test_module_compiles_whole():
    layer = rx.RoutedExperts(EXPERTS, HIDDEN, INNER)
    x, index, w = inputs()
    wanted = layer(x, index, w)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, index, w), wanted)


def test_auto_chooses_at_run_time(monkeypatch):
    from routed_experts import selection

    weights, _ = make()
    seen = []
    original = selection.choose

    def spy(*args, **kwargs):
        seen.append(kwargs["num_tokens"])
        return original(*args, **kwargs)

    monkeypatch.setattr(selection, "choose", spy)
    compiled = torch.compile(lambda x, i, w: rx.run_experts(x, i, w, weights), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 5, 9):
            compiled(*inputs(tokens))
    assert seen == [3, 5, 9]


def test_the_operator_knows_weights_of_other_addresses():
    """What is chosen for aligned weights may not be able to run others of the same shape."""
    from routed_experts.compiled import experts_of

    _, tensors = make()
    aligned = list(tensors.values())
    shifted = [torch.empty(t.numel() + 1)[1:].view_as(t) for t in aligned]
    found = [
        experts_of([first, None, second, None, None, None], "silu;None;None;False;True")
        for first, second in (aligned, shifted, aligned)
    ]
    assert found[0]._choices is found[2]._choices
    assert found[0]._choices is not found[1]._choices


def test_autocast_compiled():
    weights, tensors = make()
    x, index, w = inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x, index, w):
        with torch.autocast("cpu", torch.bfloat16):
            return rx.run_experts(x, index, w, weights)

    with torch.no_grad():
        out = call(x, index, w)
    assert out.dtype == torch.float32
    assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]


def test_checked_mode_compiled():
    weights, _ = make()
    compiled = torch.compile(
        lambda x, i, w: rx.run_experts(x, i, w, weights, checked=True), backend="aot_eager", fullgraph=True
    )
    x, _, w = inputs()
    with torch.no_grad():
        compiled(x, torch.zeros(5, 2, dtype=torch.long), w)
        with pytest.raises(rx.ExpertIndexError):
            compiled(x, torch.full((5, 2), EXPERTS), w)


def test_named_refusal_reaches_the_user():
    weights, _ = make()
    compiled = torch.compile(
        lambda x, i, w: rx.run_experts(x, i, w, weights, backend="group_mm"),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match="grouped_mm"):
        compiled(*inputs())


@pytest.mark.parametrize("flags", [{}, {"swiglu_limit": 1.5, "swiglu_alpha": 1.702}], ids=["silu", "clamped"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm"])
def test_every_size_may_be_a_symbol(backend, grad, flags):
    """With dynamic=True the sizes of weights and the constants of a gate are symbols too."""
    weights, tensors = make(grad=grad, **flags)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, index, w: rx.run_experts(x, index, w, weights, backend=backend),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (5, 7, 11, 13):
        x, index, w = inputs(tokens)
        out = compiled(x, index, w)
        assert relative_error(out.detach(), experts_oracle(x, index, w, tensors, flags).detach()) < 1e-5
        if grad:
            out.sum().backward()
            assert all(t.grad.isfinite().all() for t in tensors.values())
    assert counter.frame_count <= 2
