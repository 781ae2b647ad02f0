"""The launches around padded rows give what the torch steps give, on Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from external_experts import INNER, E, H, K, plain, routed
from external_fakes import unpack_exponents

from routed_experts import padded_launches, padded_steps
from routed_experts.layout import build_layout
from routed_experts.padded_steps import Cast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASTS = [None, Cast(128, False), Cast(128, True), Cast(32, True)]


def layout_of(ids):
    return build_layout(ids, E, alignment=16)


def same_rows(one, two, owned, cast, looser=0.0):
    """Owned rows and scales are the same, but for a few neighbours."""
    first, second = one.values[owned].float().cpu(), two.values[owned].float().cpu()
    if cast is None:
        assert torch.allclose(first, second, rtol=1e-2 + looser, atol=1e-3)
        return
    # The interpreter flushes e4m3's subnormals to 0; a GPU divides by an approximation.
    step = torch.exp2(torch.floor(torch.log2(second.abs().clamp(min=2**-6))) - 3)
    assert ((first - second).abs() <= step.clamp(min=0 if DEVICE == "cuda" else 2**-6)).all()
    if not looser:
        assert (first != second)[second.abs() >= 2**-6].float().mean() < 2e-3
    assert one.scales.stride() == two.scales.stride()
    if cast.packed:
        assert torch.equal(one.scales[owned].cpu(), two.scales[owned].cpu())
    else:
        assert torch.allclose(one.scales[owned].cpu(), two.scales[owned].cpu(), rtol=1e-5 + looser)


def same_values(one, two, owned, cast):
    """What owned rows stand for is the same, where a scale may have rounded to the next power of two."""
    codes, scales = [], []
    for rows in (one, two):
        groups = rows.values.shape[1] // cast.group
        codes.append(rows.values[owned].float().cpu())
        scales.append(unpack_exponents(rows.scales[owned].cpu(), groups).repeat_interleave(cast.group, 1))
    assert (torch.log2(scales[0]) - torch.log2(scales[1])).abs().max() <= 1
    first, second = (code * scale for code, scale in zip(codes, scales, strict=True))
    # A step of e4m3 is at most an eighth; beside it what the bias's rounding moves, in the larger of both scales.
    coarse = torch.maximum(*scales)
    assert ((first - second).abs() <= 0.13 * second.abs() + coarse * 2**-5).all()
    assert float((first - second).norm() / second.norm()) < 4e-2


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 23])
def test_gather(poisoned, cast, tokens):
    x, ids, _ = (t.to(DEVICE) for t in routed(tokens, sentinels=tokens > 1))
    wide = torch.cat([x, x], 1)[:, H:]
    layout = layout_of(ids)
    rows, position = padded_launches.gather(wide, layout, K, cast)
    wanted, place = padded_steps.gather(x.cpu(), layout_of(ids.cpu()), K, cast)
    same_rows(rows, wanted, layout.row_expert.cpu() >= 0, cast)
    real = ((ids >= 0) & (ids < E)).flatten().cpu()
    assert torch.equal(position.cpu()[real], place[real])


FLAGS = [
    {},
    {"is_concatenated": False, "bias": True},
    {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "bias": True},
    {"gated": False, "activation": "relu2", "bias": True},
    {"gate": lambda u: torch.tanh(u[..., :INNER]) * u[..., INNER:], "bias": True},
]


def on_device(experts):
    return experts.with_tensors({n: None if t is None else t.to(DEVICE) for n, t in experts._tensors.items()})


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_gate(cast, flags):
    experts = plain(**flags)
    layout = layout_of(routed(11, sentinels=True)[1])
    width = experts.up_weight.shape[1]
    u = torch.randn(layout.row_expert.shape[0], width).bfloat16()
    wanted = padded_steps.gate(u, experts, layout, cast)
    there = layout._replace(**{n: t.to(DEVICE) for n, t in layout._asdict().items()})
    got = padded_launches.gate(u.to(DEVICE), on_device(experts), there, cast)
    # A gate of one's own sees the sum with the bias in bfloat16.
    looser = 2e-2 if "gate" in flags else 0.0
    if looser and cast is not None and cast.packed:
        same_values(got, wanted, layout.row_expert >= 0, cast)
    else:
        same_rows(got, wanted, layout.row_expert >= 0, cast, looser)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_weigh(bias, dtype):
    experts = plain(bias=bias)
    x, ids, weights = routed(13, sentinels=True)
    layout = layout_of(ids)
    _, position = padded_steps.gather(x, layout, K, None)
    rows = torch.randn(layout.row_expert.shape[0], H).bfloat16()
    rows[layout.row_expert < 0] = float("nan")
    weights.view(-1)[(ids.view(-1) < 0) | (ids.view(-1) >= E)] = float("inf")
    wanted = padded_steps.weigh(rows, position, experts, ids, weights)
    call = (rows, position, on_device(experts), ids.to(dtype).t().contiguous().t(), weights)
    got = padded_launches.weigh(*(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in call))
    assert wanted.isfinite().all()
    assert torch.allclose(got.cpu().float(), wanted.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("columns", [128, 384, 640])
def test_words_of_scales_are_filled_up(columns):
    x, ids, _ = routed(5)
    x = x.repeat(1, 3)[:, :columns].contiguous()
    cast = Cast(128, True)
    rows, _ = padded_launches.gather(x.to(DEVICE), layout_of(ids.to(DEVICE)), K, cast)
    wanted, _ = padded_steps.gather(x, layout_of(ids), K, cast)
    owned = layout_of(ids).row_expert >= 0
    assert torch.equal(rows.scales.cpu()[owned], wanted.scales[owned])
    last = rows.scales.cpu()[owned][:, -1:].contiguous().view(torch.uint8)
    assert (last[:, columns // 128 % 4 or 4 :] == 127).all()
