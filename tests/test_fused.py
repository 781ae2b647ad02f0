"""The fused kernels under Triton's interpreter, against the float64 oracle, on poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import BASE_CASE as BASE
from cases import build, pairwise
from oracle import TOLERANCE, experts_oracle, relative_error

import routed_experts as rx
from routed_experts.backends import fused
from routed_experts.backends.spec import Spec
from routed_experts.gates import ACTIVATIONS

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU; test_gpu_fused.py runs here")

NAME = "fused_interpreted"


@pytest.fixture(autouse=True)
def interpreted():
    """The CUDA row of `fused` under a name of its own, on CPU tensors."""
    row = fused.BACKEND.rows[0][0]
    requires = tuple(r for r in row.requires if r["kind"] in ("dtype", "unquantized"))
    rx.register_backend(NAME, fused.run, spec=Spec(name=NAME, takes="routing", gives="tokens", requires=requires))
    yield
    rx.unregister_backend(NAME)


@pytest.fixture
def kernels():
    from routed_experts.kernels import choice, configs, fused

    return {"configs": configs, "fused": fused, "choice": choice}


def check(case, seed=0, **how):
    x, index, weights, tensors, flags = build(case, seed)
    wanted = experts_oracle(x, index, weights, tensors, flags, weights_on=case.weights_on)
    out = rx.run_experts(
        x, index, weights, rx.ExpertWeights(**tensors, **flags), backend=NAME, weights_on=case.weights_on, **how
    )
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    assert relative_error(out, wanted) <= TOLERANCE[case.dtype]
    return out


FORWARD = [case for case in pairwise() if case.dtype != torch.float64]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_pair_of_factors(case, poisoned):
    poisoned()
    check(case)


@pytest.mark.parametrize("sizes", [(40, 264), (264, 40), (128, 128)])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 4), (16, 4), (13, 5)])
def test_both_regimes_at_odd_sizes(tokens, top_k, sizes, poisoned):
    """B31: 64 pairs are the last that go unsorted."""
    check(dataclasses.replace(BASE, tokens=tokens, top_k=top_k, sizes=sizes, num_experts=5, routing="sentinels"))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])
def test_layouts_with_bias(tokens, is_transposed, is_concatenated, poisoned):
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated}
    check(dataclasses.replace(BASE, tokens=tokens, sizes=(48, 24), bias=True, gate="oai", **flags))


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, has_gate):
    g = torch.Generator().manual_seed(0)
    up = torch.randn(3, 16 * (1 + has_gate), 8, generator=g)
    down = torch.randn(3, 8, 16, generator=g)
    experts = rx.ExpertWeights(**{"gate_up_proj" if has_gate else "up_proj": up}, down_proj=down, activation=activation)
    x, index, weights = torch.randn(5, 8, generator=g), torch.randint(0, 3, (5, 2), generator=g), torch.rand(5, 2)
    wanted = rx.run_experts(x, index, weights, experts, backend="eager")
    out = rx.run_experts(x, index, weights, experts, backend=NAME)
    assert relative_error(out, wanted.double()) < 1e-5


@pytest.mark.parametrize("top_k", [1, 20])
def test_one_expert_for_every_slot(top_k, poisoned):
    """A token may name an expert more than once; more slots than are unrolled."""
    check(dataclasses.replace(BASE, tokens=3, top_k=top_k, routing="one expert", dtype=torch.float32))


@pytest.mark.parametrize("table", ["default", "Hopper"])
@pytest.mark.parametrize("mean_rows", [2, 6, 30, 200])
def test_every_configuration(table, mean_rows, kernels, monkeypatch, poisoned):
    capability = (9, 0) if table == "Hopper" else (8, 0)
    monkeypatch.setattr(kernels["fused"], "limits", lambda device: kernels["choice"].Device(capability, 232448))
    tokens = max(33, mean_rows)
    check(dataclasses.replace(BASE, tokens=tokens, num_experts=max(1, 2 * tokens // mean_rows), sizes=(72, 40)))


@pytest.mark.parametrize("gate", ["silu", "oai", "own", "no gate, relu2"])
@pytest.mark.parametrize(
    ("is_transposed", "is_concatenated", "sizes"),  # multiples of 16: the oldest interpreters ask for that
    [(False, True, (80, 272)), (False, False, (64, 144)), (True, False, (80, 144))],
)
def test_large_calls_by_descriptor(gate, is_transposed, is_concatenated, sizes, kernels, monkeypatch, poisoned):
    monkeypatch.setattr(kernels["choice"], "_LARGE_FLOPS", 0)
    ran = []
    launch = kernels["fused"].launch
    monkeypatch.setattr(kernels["fused"], "launch", lambda one: ran.append(one.kernel.__name__) or launch(one))
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated}
    check(
        dataclasses.replace(
            BASE, tokens=130, num_experts=2, sizes=sizes, bias=True, routing="sentinels", gate=gate, **flags
        )
    )
    assert {"up_large", "down_large"} <= set(ran)


def test_parts_of_the_depth_are_summed(kernels, monkeypatch, poisoned):
    choose = kernels["fused"].choose
    monkeypatch.setattr(kernels["fused"], "choose", lambda *a, **k: choose(*a, **k)._replace(split=3))
    check(dataclasses.replace(BASE, tokens=2, sizes=(24, 400), bias=True, dtype=torch.float32))


@pytest.mark.parametrize("shared_limit", [49152, 65536, 101376, 166912, 232448])
@pytest.mark.parametrize("item_size", [1, 2, 4])
def test_configurations_fit_the_device(shared_limit, item_size, kernels):
    """B66: stages go first, then depth, then columns."""
    configs = kernels["configs"]
    for table in (configs._HOPPER, configs._DEFAULT):
        for up, down in (table.unsorted, *((regime.up, regime.down) for regime in table.regimes)):
            for config, widths in ((up, 2), (down, 1)):
                fitted = configs.fit(config, widths, item_size, shared_limit)
                assert configs._shared(fitted, widths, item_size) <= shared_limit
                assert fitted.rows == config.rows
                if configs._shared(config._replace(stages=2), widths, item_size) <= shared_limit:
                    assert fitted[1:3] == config[1:3]


def test_too_little_room_is_an_error_with_a_way_out(kernels, monkeypatch):
    import triton

    def no_room(one):
        raise triton.OutOfResources(300000, 101376, "shared memory")

    monkeypatch.setattr(kernels["fused"], "launch", no_room)
    with pytest.raises(rx.BackendUnavailable, match="grouped_mm"):
        check(BASE)


def test_less_room_than_the_table_assumes(kernels, monkeypatch, poisoned):
    """B66: what does not fit is tried smaller, and the result is the same."""
    import triton

    launch, tried = kernels["fused"].launch, []

    def little_room(one):
        tried.append(one.num_stages)
        if one.num_stages > 2:
            raise triton.OutOfResources(300000, 101376, "shared memory")
        return launch(one)

    monkeypatch.setattr(kernels["fused"], "launch", little_room)
    check(dataclasses.replace(BASE, tokens=4))
    assert tried[0] > 2


@pytest.mark.parametrize("gate", ["silu", "own", "no gate, relu2"])
@pytest.mark.parametrize("norm", [False, True])
def test_compiled_without_a_break(gate, norm):
    case = dataclasses.replace(BASE, gate=gate, norm=norm, dtype=torch.float32)
    x, index, weights, tensors, flags = build(case)
    experts = rx.ExpertWeights(**tensors, **flags)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x, index, weights):
        return rx.run_experts(x, index, weights, experts, backend=NAME)

    assert relative_error(call(x, index, weights), experts_oracle(x, index, weights, tensors, flags)) < 1e-5


def test_autocast_converts_weights_in_the_kernel():
    case = dataclasses.replace(BASE, dtype=torch.float32)
    x, index, weights, tensors, flags = build(case)
    experts = rx.ExpertWeights(**tensors, **flags)
    with torch.autocast("cpu", torch.bfloat16):
        out = rx.run_experts(x, index, weights, experts, backend=NAME)
    assert relative_error(out, experts_oracle(x, index, weights, tensors, flags)) < TOLERANCE[torch.bfloat16]
