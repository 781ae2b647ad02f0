"""The fused kernels on quantized experts under Triton's interpreter, against float64, on poisoned memory."""

from __future__ import annotations

import pytest
import torch
from oracle import experts_oracle, relative_error
from quantized_stacks import Stored, build, routing

import routed_experts as rx
from routed_experts.backends import batched_mm, fused, grouped_mm
from routed_experts.backends.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU; test_gpu_quantized.py runs")

NAME = "fused_interpreted"
FORMATS = [
    Stored("fp8_block", (128, 128)),
    Stored("fp8_block", (32, 64), ue8m0=True),
    Stored("fp8_block", (16, 48)),
    Stored("fp8_block", (1, 32)),
    Stored("mxfp8", (1, 32), ue8m0=True),
    Stored("fp8_tensor"),
    Stored("mxfp4", (1, 32), ue8m0=True),
    Stored("mxfp4", (1, 32)),
]
# The interpreter truncates to bfloat16. Rows that are quantized too have E4M3's error twice.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-6}
QUANTIZED_ROWS = 6e-2
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture
def kernels():
    from routed_experts.kernels import choice, fused

    return {"fused": fused, "choice": choice}


@pytest.fixture(autouse=True)
def interpreted():
    """The CUDA row of `fused` under a name of its own, on CPU tensors."""
    requires = tuple(r for r in fused.BACKEND.rows[0][0].requires if r["kind"] == "dtype")
    rx.register_backend(NAME, fused.run, spec=Spec(name=NAME, takes="routing", gives="tokens", requires=requires))
    yield
    rx.unregister_backend(NAME)


@pytest.fixture(params=[HOPPER, AMPERE], ids=["SM90", "SM80"])
def capability(request, kernels, monkeypatch):
    device = kernels["choice"].Device(request.param, 232448)
    monkeypatch.setattr(kernels["fused"], "limits", lambda _: device)
    monkeypatch.setattr("routed_experts.kernels.steps.limits", lambda _: device)
    return request.param


@pytest.fixture
def narrow_off(kernels, monkeypatch):
    """Rows as they are, whatever the tables say."""
    monkeypatch.setattr(kernels["choice"], "_groups_fit", lambda experts: False)


def check(stored, tokens, *, top_k=2, experts=4, sizes=(96, 64), dtype=torch.bfloat16, tolerance=None, **flags):
    weights, wide = build(stored, experts=experts, hidden=sizes[0], inner=sizes[1], dtype=dtype, **flags)
    x, ids, scale = routing(tokens, top_k, experts, sizes[0], dtype, sentinels=True)
    declared = {name: value for name, value in flags.items() if name not in ("bias", "has_gate")}
    wanted = experts_oracle(x, ids, scale, wide, declared)
    out = rx.run_experts(x, ids, scale, weights, backend=NAME)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    assert relative_error(out, wanted) <= (tolerance or TOLERANCE[dtype])
    nobody = ((ids < 0) | (ids >= experts)).all(1)
    assert not out[nobody].any()
    return out


@pytest.mark.parametrize("tokens", [5, 40], ids=["by pair", "by tile"])
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_formats(stored, tokens, capability, poisoned):
    """Blocks longer than the depth, short last blocks, groups inside a step and across its end."""
    poisoned()
    inner = 96 if stored.block == (16, 48) else 64
    check(stored, tokens, sizes=(160, inner), tolerance=QUANTIZED_ROWS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_dtypes_of_the_rows(stored, dtype, narrow_off, poisoned):
    check(stored, 4, sizes=(160, 96 if stored.block == (16, 48) else 64), dtype=dtype)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("stored", [FORMATS[0], Stored("fp8_block", (32, 32)), Stored("fp8_tensor")], ids=str)
def test_layouts(stored, is_transposed, has_gate, tokens, capability, poisoned):
    flags = {"is_transposed": is_transposed, "has_gate": has_gate, "bias": True}
    check(stored, tokens, tolerance=QUANTIZED_ROWS, activation="gelu", **flags)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("stored", FORMATS[4:7], ids=str)
def test_interleaved_halves(stored, tokens, is_transposed, capability, poisoned):
    if is_transposed and stored.fmt == "mxfp4":
        is_transposed = False
    flags = {"is_concatenated": False, "is_transposed": is_transposed, "swiglu_limit": 1.5, "swiglu_alpha": 1.7}
    check(stored, tokens, tolerance=QUANTIZED_ROWS, **flags)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize(
    ("stored", "flags"),
    [
        (FORMATS[0], {}),
        (FORMATS[0], {"has_gate": False, "activation": "relu2", "bias": True}),
        (Stored("fp8_block", (1, 128)), {"is_concatenated": False, "bias": True}),
        (Stored("fp8_tensor"), {"is_concatenated": False}),
    ],
    ids=["halves", "no gate", "pairs", "tensor pairs"],
)
def test_rows_of_e4m3(stored, flags, described, kernels, monkeypatch, poisoned):
    """Depths and widths that no tile divides; scales of more than one step."""
    monkeypatch.setattr(kernels["choice"], "_LARGE_FLOPS", 0 if described else float("inf"))
    ran = []
    launch = kernels["fused"].launch
    monkeypatch.setattr(kernels["fused"], "launch", lambda one: ran.append(one) or launch(one))
    inner = 272 if stored.block != (128, 128) else 256
    poisoned()
    check(stored, 50, experts=2, sizes=(304, inner), tolerance=QUANTIZED_ROWS, **flags)
    names = {one.kernel.__name__ for one in ran}
    assert {"quantize_rows", "up_e4m3", "down_e4m3"} <= names
    assert not names & {"up_by_tile", "down_by_tile"}
    assert {one.constants["DESCRIBED"] for one in ran if one.kernel.__name__.endswith("_e4m3")} == {described}


def test_no_tokens():
    weights, _ = build(FORMATS[0])
    empty = torch.zeros(0, 2)
    assert rx.run_experts(torch.zeros(0, 64), empty.long(), empty, weights, backend=NAME).shape == (0, 64)


@pytest.mark.parametrize("backend", [batched_mm, grouped_mm], ids=["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("stored", [FORMATS[0], FORMATS[4], FORMATS[6]], ids=str)
def test_products_of_other_backends(stored, tokens, backend, capability, poisoned):
    spec, run = backend.BACKEND.rows[-1]
    assert spec.path == "triton"
    name = "interpreted_product"
    rx.register_backend(name, run, spec=Spec(name=name, takes=spec.takes, gives=spec.gives))
    try:
        weights, wide = build(stored, bias=True, dtype=torch.float32)
        x, ids, scale = routing(tokens, 2, 4, 64, torch.float32, sentinels=True)
        poisoned()
        out = rx.run_experts(x, ids, scale, weights, backend=name)
        assert relative_error(out, experts_oracle(x, ids, scale, wide, {})) < 2e-6
    finally:
        rx.unregister_backend(name)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("stored", [FORMATS[0], FORMATS[4], FORMATS[5], FORMATS[6]], ids=str)
def test_gradients(stored, is_transposed, capability, poisoned):
    """Of tokens and routing weights, through the numbers that the weights stand for."""
    flags = {"is_transposed": is_transposed and stored.fmt != "mxfp4", "bias": True}
    weights, wide = build(stored, dtype=torch.float32, **flags)
    x, ids, scale = routing(9, 2, 4, 64, torch.float32, sentinels=True)
    given = [t.clone().requires_grad_() for t in (x, scale)]
    poisoned()
    out = rx.run_experts(given[0], ids, given[1], weights, backend=NAME)
    out.backward(torch.ones_like(out))
    wanted = [t.double().requires_grad_() for t in (x, scale)]
    declared = {"is_transposed": flags["is_transposed"]}
    experts_oracle(wanted[0], ids, wanted[1], wide, declared).sum().backward()
    for ours, theirs in zip(given, wanted, strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-5
