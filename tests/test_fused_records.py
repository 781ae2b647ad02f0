"""E2M1 experts multiplied as E4M3 numbers, by rows that are quantized, under Triton's interpreter.

Against float64 over rows that are quantized the same way: what is left is what the kernels themselves lose.
"""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error
from quantized_stacks import Stored, build, routing

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU; test_gpu_quantized.py runs")

MXFP4 = Stored("mxfp4", (1, 32), ue8m0=True)
HIDDEN, INNER, EXPERTS = 256, 384, 4


@pytest.fixture
def run(monkeypatch):
    """The fused call as a Hopper GPU would make it; the names of its kernels are kept."""
    from routed_experts.kernels import choice, fused

    ran = []
    launch = fused.launch
    monkeypatch.setattr(fused, "limits", lambda _: choice.Device((9, 0), 232448))
    monkeypatch.setattr(fused, "launch", lambda one: ran.append(one.kernel.__name__) or launch(one))

    def call(*arguments):
        ran.clear()
        return fused.run_fused(*arguments), list(ran)

    return call


def quantized(rows):
    """Rows as E4M3 numbers of a scale each, in float64."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return (rows / scale).to(torch.float8_e4m3fn).double() * scale.double()


def truncated(rows):
    """In bfloat16 as the interpreter makes it: a digit more or less decides how E4M3 is rounded."""
    return (rows.float().view(torch.int32) & -65536).view(torch.float32)


def reference(x, ids, scale, wide, is_gated=True):
    """SiLU experts over rows that are quantized before each product."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in (ids < EXPERTS).logical_and(ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        up, down = wide["gate_up_proj" if is_gated else "up_proj"][expert], wide["down_proj"][expert]
        u = quantized(x[token : token + 1]) @ up.T
        if is_gated:
            gate, linear = u.chunk(2, 1)
            u = torch.nn.functional.silu(gate) * linear
        else:
            u = torch.nn.functional.silu(u)
        out[token] += scale[token, slot].double() * (quantized(truncated(u)) @ down.T)[0]
    return out


def check(run, tokens, weights, wide, **flags):
    x, ids, scale = routing(tokens, 2, EXPERTS, HIDDEN, torch.bfloat16, sentinels=True)
    out, ran = run(weights, x, ids, scale)
    assert ran.count("record_rows") == 2
    wanted = reference(x, ids, scale, wide, **flags)
    # The interpreter truncates sums to bfloat16; where one of a few large ones decides a rounding, a token shows it.
    assert relative_error(out, wanted) < 4e-2
    each = (out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert each[each.isfinite()].median() < 1e-2
    return out


@pytest.mark.parametrize("tokens", [1, 5, 40, 600], ids=["one", "by pair", "by tile", "by tall tile"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_same_quantization(tokens, is_gated, run, poisoned):
    poisoned()
    weights, wide = build(MXFP4, experts=EXPERTS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16, has_gate=is_gated)
    check(run, tokens, weights, wide, is_gated=is_gated)


@pytest.mark.parametrize("lower", [1, 11, 14, 40])
@pytest.mark.parametrize("whole", [False, True], ids=["groups", "columns"])
def test_small_scales(lower, whole, run, poisoned):
    """Columns, or every second group, whose scales are so many powers of two below all others."""
    weights, wide = build(MXFP4, experts=EXPERTS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16)
    scale = weights.down_scale.view(torch.uint8)
    chosen = (slice(None), slice(None, 32)) if whole else (slice(None), slice(None), slice(None, None, 2))
    scale[chosen] -= lower
    values = wide["down_proj"].unflatten(2, (-1, 32))
    values[chosen] *= 2.0**-lower
    poisoned()
    out = check(run, 5, weights, wide)
    if whole:
        x, ids, weight = routing(5, 2, EXPERTS, HIDDEN, torch.bfloat16, sentinels=True)
        assert relative_error(out[:, :32], reference(x, ids, weight, wide)[:, :32]) < 2e-2


@pytest.mark.parametrize("tokens", [6, 40])
def test_rows_of_zeros_and_tiny_ones(tokens, run, poisoned):
    """A row has a scale of its own: another one's size costs it no digit, and zeros stay zeros."""
    weights, wide = build(MXFP4, experts=EXPERTS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16)
    x, ids, scale = routing(tokens, 2, EXPERTS, HIDDEN, torch.bfloat16)
    x[0], x[1], x[2] = 0, x[1] * 2.0**-20, x[2] * 4
    poisoned()
    out, _ = run(weights, x, ids, scale)
    assert not out[0].any()
    wanted = reference(x, ids, scale, wide)
    for token in (1, 2, 3):
        assert (out[token].double() - wanted[token]).norm() < 4e-2 * wanted[token].norm()


@pytest.mark.parametrize("width", [160, 64])
def test_depths_of_no_whole_steps(width, run):
    weights, _ = build(MXFP4, experts=EXPERTS, hidden=width, inner=128, dtype=torch.bfloat16)
    x, ids, scale = routing(3, 2, EXPERTS, width, torch.bfloat16, sentinels=True)
    assert "record_rows" not in run(weights, x, ids, scale)[1]
