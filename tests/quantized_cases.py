"""Quantized experts of every format, scale dtype and layout flag that go together, and inputs for them."""

from __future__ import annotations

import itertools

import torch

import routed_experts as rx

E8M0 = torch.float8_e8m0fnu
BACKENDS = ("eager", "batched_mm", "grouped_mm")
# (format, block, dtype of the scales)
SCHEMES = (
    ("fp8_block", (32, 32), torch.float32),
    ("fp8_block", (128, 128), torch.float32),
    ("fp8_block", (32, 64), E8M0),
    ("fp8_block", (1, 48), torch.float32),
    ("mxfp8", None, E8M0),
    ("fp8_tensor", None, torch.float32),
    ("fp8_tensor", None, E8M0),
    ("mxfp4", None, E8M0),
    ("mxfp4", None, torch.float32),
)
# H does not divide by 64 or 48: the last blocks are short.
EXPERTS, HIDDEN, INNER = 5, 160, 96


def _fits(scheme, is_transposed, is_concatenated, has_gate):
    fmt, block, _ = scheme
    if fmt == "mxfp4" and is_transposed:
        return False
    return is_concatenated or not has_gate or block is None or block[0] == 1


LAYOUTS = [
    (scheme, *flags)
    for scheme, *flags in itertools.product(SCHEMES, (False, True), (True, False), (True, False), (False, True))
    if _fits(scheme, *flags[:3]) and (flags[2] or flags[1])
]


def name_of(layout):
    (fmt, block, scale), transposed, concatenated, gated, bias = layout
    parts = [fmt, "" if block is None else f"{block[0]}x{block[1]}", "f32" if scale == torch.float32 else "e8m0"]
    words = zip((transposed, not concatenated, not gated, bias), ("transposed", "interleaved", "ungated", "bias"))  # noqa: B905
    return "-".join(part for part in (*parts, *(word for on, word in words if on)) if part)


def floating(layout, seed=0, inner=None):
    """Floating experts in a layout; one row of the first expert is 0 and one of the second is tiny."""
    scheme, is_transposed, is_concatenated, has_gate, bias = layout
    g = torch.Generator().manual_seed(seed)
    # A block must not straddle gate and up.
    inner = inner or (128 if scheme[1] == (128, 128) else INNER)
    width = 2 * inner if has_gate else inner
    up = torch.randn(EXPERTS, width, HIDDEN, generator=g) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, inner, generator=g) / inner**0.5
    up[0, 3], down[1, 5] = 0, 6e-38
    name = "gate_up_proj" if has_gate else "up_proj"
    tensors = {
        name: up.mT.contiguous() if is_transposed else up,
        "down_proj": down.mT.contiguous() if is_transposed else down,
    }
    if bias:
        tensors |= {
            f"{name}_bias": torch.randn(EXPERTS, width, generator=g) * 0.3,
            "down_proj_bias": torch.randn(EXPERTS, HIDDEN, generator=g).bfloat16() * 0.3,
        }
        tensors["down_proj_bias"] = tensors["down_proj_bias"].float()
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated, "activation": "silu"}
    return tensors, flags


def quantized(layout, seed=0, **changes):
    """Return (quantized experts, floating experts, flags)."""
    tensors, flags = floating(layout, seed)
    plain = rx.ExpertWeights(**tensors, **{**flags, **changes})
    fmt, block, scale_dtype = layout[0]
    return rx.quantize_experts(plain, fmt, block=block, scale_dtype=scale_dtype), plain, {**flags, **changes}


def routed(tokens=17, top_k=2, dtype=torch.float32, seed=1, sentinels=False):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    index = torch.randint(0, EXPERTS - 1, (tokens, top_k), generator=g)  # the last expert is never hit
    weights = 0.1 + torch.rand(tokens, top_k, generator=g)
    if sentinels:
        gone = torch.rand(tokens, top_k, generator=g) < 0.4
        index = torch.where(gone, torch.where(torch.rand(tokens, top_k, generator=g) < 0.5, -1, EXPERTS), index)
    return x, index, weights
