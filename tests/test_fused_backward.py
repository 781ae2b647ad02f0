"""Gradients of the fused kernels under Triton's interpreter, against the float64 oracle, on poisoned memory."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from cases import BASE_CASE as BASE
from cases import build, pairwise
from oracle import TOLERANCE, experts_oracle, relative_error
from test_backends import leaf_like, oracle_of, run_all_rows
from torch.utils.checkpoint import checkpoint

import routed_experts as rx
from routed_experts.backends import fused
from routed_experts.backends.spec import Spec
from routed_experts.gates import ACTIVATIONS

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU; test_gpu_fused_training.py runs here")

NAME = "fused_interpreted"
ROW = SimpleNamespace(name=NAME, path="triton", spec=fused.BACKEND.rows[0][0], run=fused.run)
SMALL = dataclasses.replace(BASE, tokens=11, num_experts=5, routing="sentinels", dtype=torch.float32)


@pytest.fixture(autouse=True)
def interpreted():
    """The CUDA row of `fused` under a name of its own, on CPU tensors."""
    rx.register_backend(NAME, fused.run, spec=Spec(name=NAME, takes="routing", gives="tokens"))
    yield
    rx.unregister_backend(NAME)


@pytest.fixture
def kernels():
    from routed_experts.kernels import backward, choice, fused, training

    return SimpleNamespace(backward=backward, choice=choice, fused=fused, training=training)


def check(case, seed=0, slack=1):
    """Values and every gradient, their dtypes, and the strides of those of the weights."""
    assert run_all_rows(case, seed=seed, slack=slack, rows=[ROW]) == [(NAME, "triton")]


def trained(case, seed=0, *, call=None, cotangent=None):
    """Run a case forward and backward; return the result and the leaves, whose gradients are there."""
    x, index, weights, tensors, flags = build(case, seed)
    leaves = {name: leaf_like(t, "cpu") for name, t in {"x": x, "weights": weights, **tensors}.items()}
    experts = rx.ExpertWeights(**{name: leaves[name] for name in tensors}, **flags)

    def run(x, weights):
        return rx.run_experts(x, index, weights, experts, backend=NAME, weights_on=case.weights_on)

    out = (call or (lambda run, *inputs: run(*inputs)))(run, leaves["x"], leaves["weights"])
    out.backward(torch.ones_like(out) if cotangent is None else cotangent)
    return out, leaves


def same_bits(one, other):
    assert torch.equal(one[0], other[0])
    for name, leaf in one[1].items():
        assert torch.equal(leaf.grad, other[1][name].grad), name


# The interpreter takes ten seconds for a thousand pairs; test_gpu_fused_training.py runs those too.
CASES = [case for case in pairwise() if case.dtype != torch.float64 and 0 < case.tokens * case.top_k < 1000]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_factors(case, poisoned):
    poisoned()
    check(case)


@pytest.mark.parametrize("sizes", [(40, 264), (264, 40), (128, 128)])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 4), (40, 4)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_odd_sizes_and_configurations(capability, tokens, top_k, sizes, kernels, monkeypatch, poisoned):
    monkeypatch.setattr(kernels.backward, "limits", lambda device: kernels.choice.Device(capability, 101376))
    monkeypatch.setattr(kernels.training, "limits", lambda device: kernels.choice.Device(capability, 101376))
    check(dataclasses.replace(BASE, tokens=tokens, top_k=top_k, sizes=sizes, num_experts=3, routing="sentinels"))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_layouts_with_bias(is_transposed, is_concatenated, strided, poisoned):
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated, "strided": strided}
    check(dataclasses.replace(SMALL, sizes=(48, 24), bias=True, gate="oai", **flags))


@pytest.mark.parametrize("gate", ["silu", "oai", "no gate, relu2"])
@pytest.mark.parametrize(("is_transposed", "is_concatenated"), [(False, True), (False, False), (True, False)])
def test_large_calls_by_descriptor(gate, is_transposed, is_concatenated, kernels, monkeypatch, poisoned):
    monkeypatch.setattr(kernels.choice, "_LARGE_FLOPS", 0)
    ran = launched(kernels, monkeypatch)
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated, "bias": True}
    check(dataclasses.replace(BASE, tokens=66, num_experts=2, sizes=(72, 136), routing="sentinels", gate=gate, **flags))
    assert {"up_large", "down_large", "gather_rows", "rows_through_gate", "weight_gradient_large"} <= set(ran)
    assert not {"up_by_tile", "down_by_tile", "units_gradient"} & set(ran)


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_large_calls_around_a_gate_of_ones_own(weights_on, kernels, monkeypatch, poisoned):
    monkeypatch.setattr(kernels.choice, "_LARGE_FLOPS", 0)
    ran = launched(kernels, monkeypatch)
    case = dataclasses.replace(BASE, tokens=66, num_experts=2, sizes=(72, 136), routing="sentinels", gate="own")
    check(dataclasses.replace(case, is_concatenated=False, weights_on=weights_on))
    assert {"up_large", "down_large", "gather_rows", "weight_gradient_large"} <= set(ran)


@pytest.mark.parametrize("tokens", [33, 64, 95, 97])
def test_large_calls_of_whole_and_broken_steps(tokens, kernels, monkeypatch, poisoned):
    """One expert with two rows a token, another with none: 66 to 194 rows in steps of 64."""
    monkeypatch.setattr(kernels.choice, "_LARGE_FLOPS", 0)
    monkeypatch.setattr(kernels.choice, "_LARGE_ROWS", 0)
    case = dataclasses.replace(BASE, tokens=tokens, top_k=2, num_experts=2, sizes=(72, 40), routing="one expert")
    check(case)


def launched(kernels, monkeypatch):
    ran, launch = [], kernels.fused.launch
    monkeypatch.setattr(kernels.fused, "launch", lambda one: ran.append(one.kernel.__name__) or launch(one))
    return ran


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_of_activations(activation, has_gate):
    """By an identity for a first projection, so that both kinks and far ends are met exactly."""
    values = torch.tensor([-40.0, -3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.5, 40.0])
    matrix = torch.eye(9).repeat(1 + has_gate, 1)[None]
    name = "gate_up_proj" if has_gate else "up_proj"
    index, weights = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    flags = {"activation": activation, name: matrix, "down_proj": torch.eye(9)[None]}
    got, wanted = (torch.stack([values, values.flip(0)]).requires_grad_() for _ in range(2))
    for x, backend in ((got, NAME), (wanted, "eager")):
        rx.run_experts(x, index, weights, rx.ExpertWeights(**flags), backend=backend).sum().backward()
    torch.testing.assert_close(got.grad, wanted.grad, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("alpha", [None, 1.702])
def test_gradients_at_the_clamp(alpha):
    """B14: as torch's clamp, exactly at the limit a gradient passes, and behind it none does."""
    values = torch.tensor([-8.0, -7.0, -6.5, 0.0, 6.5, 7.0, 8.0])
    pairs = torch.cartesian_prod(values, values)
    flags = {"gate_up_proj": torch.eye(2)[None], "down_proj": torch.ones(1, 2, 1)}
    experts = rx.ExpertWeights(**flags, swiglu_limit=7.0, swiglu_alpha=alpha)
    index, weights = torch.zeros(49, 1, dtype=torch.long), torch.ones(49, 1)
    got, wanted = pairs.clone().requires_grad_(), pairs.clone().requires_grad_()
    for x, backend in ((got, NAME), (wanted, "eager")):
        rx.run_experts(x, index, weights, experts, backend=backend)[:, 0].sum().backward()
    torch.testing.assert_close(got.grad, wanted.grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(got.grad == 0, wanted.grad == 0)


@pytest.mark.parametrize("gate", ["silu", "own"])
def test_idle_experts_and_sentinels_get_exactly_nothing(gate, poisoned):
    case = dataclasses.replace(SMALL, tokens=6, num_experts=60, bias=True, gate=gate)
    index = build(case)[1]
    real = (index >= 0) & (index < 60)
    idle = torch.ones(60, dtype=torch.bool).index_fill(0, index[real], False)
    _, leaves = trained(case)
    assert idle.any()
    assert not real.all()
    for name, leaf in leaves.items():
        if name == "weights":
            assert (leaf.grad[~real] == 0).all()
            assert (leaf.grad[real] != 0).all()
        elif name == "x":
            assert (leaf.grad[~real.any(1)] == 0).all()
        else:
            assert (leaf.grad[idle] == 0).all()
            assert leaf.grad[~idle].flatten(1).any(1).all()


def test_parameters_of_a_gate_and_norm_of_ones_own(poisoned):
    """Their gradients are sums over all rows, and so must find nothing in those of sentinels."""
    x, index, weights, tensors, _ = build(SMALL)
    found = []
    for backend in (NAME, "eager"):
        scale, gain = torch.full((32,), 0.5).requires_grad_(), torch.full((64,), 2.0).requires_grad_()
        experts = rx.ExpertWeights(
            **{name: t.clone().requires_grad_() for name, t in tensors.items()},
            gate=lambda u, scale=scale: torch.tanh(u[..., 0::2]) * u[..., 1::2] * scale,
            post_expert_norm=lambda d, gain=gain: d * gain,
        )
        rx.run_experts(x, index, weights, experts, backend=backend).square().sum().backward()
        found.append((scale.grad, gain.grad))
    for got, wanted in zip(*found, strict=True):
        assert relative_error(got, wanted.double()) < 1e-5


@pytest.mark.parametrize("gate", ["silu", "own"])
@pytest.mark.parametrize("top_k", [1, 20])
def test_one_expert_for_every_slot(top_k, gate, poisoned):
    """A token may name an expert more than once; each time counts."""
    check(dataclasses.replace(BASE, tokens=7, top_k=top_k, routing="one expert", dtype=torch.float32, gate=gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{"bias": True}, {"gate": "own", "norm": True}], ids=str)
def test_repeats_are_equal_bits(changes, dtype, poisoned):
    case = dataclasses.replace(SMALL, dtype=dtype, **changes)
    first = trained(case)
    poisoned()
    same_bits(trained(case), first)


@pytest.mark.parametrize("routing", ["all here", "sentinels", "one expert"])
@pytest.mark.parametrize("changes", [{}, {"gate": "own", "norm": True}], ids=str)
def test_checkpointed(changes, routing, poisoned):
    case = dataclasses.replace(SMALL, routing=routing, bias=True, **changes)
    again = trained(case, call=lambda run, *inputs: checkpoint(run, *inputs, use_reentrant=False))
    same_bits(again, trained(case))


def saved(case):
    """Shapes of all that a forward saves."""
    shapes = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t)
    with hooks:
        trained(case)
    return shapes


@pytest.mark.parametrize("gate", ["silu", "own"])
def test_what_is_saved_does_not_depend_on_the_routing(gate):
    cases = [
        dataclasses.replace(SMALL, routing=routing, gate=gate) for routing in ("all here", "sentinels", "one expert")
    ]
    first, *others = map(saved, cases)
    assert others == [first, first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["oai", "no gate, relu2"])
def test_recomputed_is_not_saved_and_has_the_same_bits(gate, dtype, monkeypatch, poisoned):
    case = dataclasses.replace(SMALL, bias=True, gate=gate, dtype=dtype)
    kept, shapes = trained(case), saved(case)
    monkeypatch.setenv("ROUTED_EXPERTS_FUSED_RECOMPUTE", "1")
    same_bits(trained(case), kept)
    product = (case.tokens * case.top_k, case.sizes[1] * (1 if gate == "no gate, relu2" else 2))
    shapes.remove(product)
    assert saved(case) == shapes


@pytest.mark.parametrize("changes", [{}, {"is_transposed": True, "gate": "own"}], ids=str)
@pytest.mark.parametrize("megatron", [False, True])
def test_main_gradients_are_added_to(megatron, changes, monkeypatch, poisoned):
    case = dataclasses.replace(SMALL, bias=True, dtype=torch.bfloat16, **changes)
    _, plain = trained(case)
    monkeypatch.setenv("ROUTED_EXPERTS_MAIN_GRAD", "1")
    before = {}

    def call(run, x, weights):
        for name, leaf in parameters(run).items():
            before[name] = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(len(name)))
            leaf.main_grad = before[name].clone()
            if megatron:
                leaf.grad_added_to_main_grad = False
        return checkpoint(run, x, weights, use_reentrant=False)

    _, leaves = trained(case, call=call)
    assert set(before) == {"gate_up_proj", "down_proj"}
    for name, leaf in leaves.items():
        if name not in before:
            assert torch.equal(leaf.grad, plain[name].grad)
            continue
        added = leaf.main_grad - before[name]
        assert relative_error(added, plain[name].grad.double()) < TOLERANCE[torch.bfloat16]
        assert added.bfloat16().float().ne(added).any()  # finer than the parameter's own gradient
        if megatron:
            assert leaf.grad_added_to_main_grad
            assert not leaf.grad.any()
        else:
            assert leaf.grad is None


def parameters(run):
    """The matrices among the leaves of :func:`trained`."""
    experts = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, rx.ExpertWeights))
    return {name: getattr(experts, name) for name in ("gate_up_proj", "down_proj")}


def test_a_main_gradient_that_does_not_fit(monkeypatch):
    monkeypatch.setenv("ROUTED_EXPERTS_MAIN_GRAD", "1")

    def call(run, x, weights):
        parameters(run)["down_proj"].main_grad = torch.zeros(3)
        return run(x, weights)

    with pytest.raises(rx.LayoutError, match="main gradient") as caught:
        trained(BASE, call=call)
    assert "float32" in caught.value.needed
    assert "ROUTED_EXPERTS_MAIN_GRAD" in caught.value.hint


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("changes", [{"bias": True}, {"gate": "own", "norm": True}], ids=str)
def test_compiled_without_a_break(changes, dynamic):
    torch.compiler.reset()

    def call(run, x, weights):
        return torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x, weights)

    case = dataclasses.replace(SMALL, **changes)
    same_bits(trained(case, call=call), trained(case))


def test_compiled_recompute(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setenv("ROUTED_EXPERTS_FUSED_RECOMPUTE", "1")
    case = dataclasses.replace(SMALL, gate="oai")
    compiled = trained(case, call=lambda run, *inputs: torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs))
    same_bits(compiled, trained(case))


LEAVES = ("x", "weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@pytest.mark.parametrize("gate", ["silu", "own"])
@pytest.mark.parametrize("wanted_by", LEAVES)
def test_one_gradient_alone(wanted_by, gate, poisoned):
    case = dataclasses.replace(SMALL, bias=True, gate=gate)
    x, index, weights, tensors, flags = build(case)
    inputs = {"x": x, "weights": weights, **tensors}
    leaf = inputs[wanted_by].requires_grad_()
    experts = rx.ExpertWeights(**{name: inputs[name] for name in tensors}, **flags)
    rx.run_experts(inputs["x"], index, inputs["weights"], experts, backend=NAME).sum().backward()
    _, leaves = trained(case)
    assert torch.equal(leaf.grad, leaves[wanted_by].grad)


@pytest.mark.parametrize("gate", ["silu", "own"])
def test_gradients_of_any_strides_are_taken(gate, poisoned):
    case = dataclasses.replace(SMALL, gate=gate)
    drawn = torch.randn(64, 11, generator=torch.Generator().manual_seed(1))
    same_bits(trained(case, cotangent=drawn.t()), trained(case, cotangent=drawn.t().contiguous()))


def test_autocast_gives_gradients_in_the_dtype_of_the_weights(poisoned):
    x, index, weights, tensors, flags = build(dataclasses.replace(SMALL, bias=True))
    leaves = {name: leaf_like(t, "cpu") for name, t in {"x": x, "weights": weights, **tensors}.items()}
    experts = rx.ExpertWeights(**{name: leaves[name] for name in tensors}, **flags)
    with torch.autocast("cpu", torch.bfloat16):
        out = rx.run_experts(leaves["x"], index, leaves["weights"], experts, backend=NAME)
    _, wanted, cotangent, _ = oracle_of(SMALL, {name: leaf.detach() for name, leaf in leaves.items()}, index, flags)
    out.backward(cotangent.float())
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32
        assert relative_error(leaf.grad, wanted[name]) < 3 * TOLERANCE[torch.bfloat16], name


def test_without_gradients_nothing_changes(kernels, monkeypatch):
    ran = launched(kernels, monkeypatch)
    x, index, weights, tensors, flags = build(dataclasses.replace(BASE, tokens=3))
    experts = rx.ExpertWeights(**{name: t.requires_grad_() for name, t in tensors.items()}, **flags)
    with torch.no_grad():
        rx.run_experts(x, index, weights, experts, backend=NAME)
    assert ran == ["up_by_pair", "down_by_pair"]
    out = rx.run_experts(x, index, weights, experts, backend=NAME)
    assert ran[2:] == ["sort_small", "up_by_tile", "down_by_tile", "weigh"]
    assert relative_error(out.detach(), experts_oracle(x, index, weights, tensors, flags).detach()) < 1.6e-2


@pytest.mark.parametrize("gate", ["silu", "own"])
def test_second_derivatives_are_refused(gate):
    x, index, weights, tensors, flags = build(dataclasses.replace(SMALL, gate=gate))
    experts = rx.ExpertWeights(**tensors, **flags)
    out = rx.run_experts(x.requires_grad_(), index, weights, experts, backend=NAME)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not require grad|once_differentiable"):
        grad.sum().backward()


PRODUCTS = ("up_by_tile", "down_by_tile", "units_gradient", "weight_gradient")


def test_less_room_than_the_table_assumes(kernels, monkeypatch, poisoned):
    """B66: what does not fit is tried smaller, and nothing is added twice to a main gradient."""
    import triton

    launch = kernels.fused.launch

    def little_room(one):
        if one.num_stages > 2 and one.kernel.__name__ in PRODUCTS:
            raise triton.OutOfResources(300000, 101376, "shared memory")
        return launch(one)

    case = dataclasses.replace(SMALL, bias=True)
    wanted = trained(case)
    monkeypatch.setattr(kernels.fused, "launch", little_room)
    monkeypatch.setenv("ROUTED_EXPERTS_MAIN_GRAD", "1")

    def call(run, x, weights):
        for leaf in parameters(run).values():
            leaf.main_grad = torch.zeros(leaf.shape)
        return run(x, weights)

    out, leaves = trained(case, call=call)
    assert torch.equal(out, wanted[0])
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(leaves[name].main_grad, wanted[1][name].grad)
