"""Experts for tests of external kernels: plain ones, and quantized ones with the weights they stand for."""

from __future__ import annotations

from typing import Any

import torch
from external_fakes import unpack_fp4

import routed_experts as rx

E, K, H, INNER = 5, 3, 256, 128


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **flags: Any) -> rx.ExpertWeights:
    """Unit-scale experts: E=5, H=256, I=128; ``bias`` adds biases."""
    g = generator(seed)
    gated, transposed, bias = flags.pop("gated", True), flags.get("is_transposed", False), flags.pop("bias", False)
    width = 2 * INNER if gated else INNER
    draw = lambda rows, columns: torch.randn(E, rows, columns, generator=g) * columns**-0.5  # noqa: E731
    up, down = draw(width, H).to(dtype), draw(H, INNER).to(dtype)
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    name = "gate_up_proj" if gated else "up_proj"
    tensors = {name: up, "down_proj": down}
    if bias:
        tensors[f"{name}_bias"] = torch.randn(E, width, generator=g).to(dtype)
        tensors["down_proj_bias"] = torch.randn(E, H, generator=g).to(dtype)
    return rx.ExpertWeights(**tensors, **flags)


def routed(tokens: int, seed: int = 1, sentinels: bool = False, experts: int = E) -> tuple[torch.Tensor, ...]:
    """Tokens (T, H) bfloat16, ids (T, K) and float32 weights; every third pair outside the range if asked."""
    g = generator(seed)
    x = torch.randn(tokens, H, generator=g).bfloat16()
    ids = torch.randint(0, experts, (tokens, K), generator=g)
    weights = torch.rand(tokens, K, generator=g)
    if sentinels:
        flat = ids.view(-1)
        flat[::3], flat[1::7] = experts, -1
    return x, ids, weights


def powers_of_two(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.exp2(torch.randint(-3, 2, shape, generator=generator(seed)).float())


def quantized(
    fmt: str, block: tuple[int, int], ue8m0: bool, seed: int = 0, experts: int = E, **more: Any
) -> tuple[rx.ExpertWeights, rx.ExpertWeights]:
    """Random e4m3 or FP4 experts with random scales, E, H, I as in ``plain``; and the float32 ones they stand for."""
    stored, values = {}, {}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, H), ("down_proj", H, INNER)):
        bn, bk = block
        if fmt == "mxfp4":
            raw = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator(seed)).to(torch.uint8)
            stored[name] = raw.view(torch.int8)
            value = unpack_fp4(stored[name])
        else:
            stored[name] = torch.randn(experts, rows, columns, generator=generator(seed)).to(torch.float8_e4m3fn)
            value = stored[name].float()
        scale = powers_of_two(experts, rows // bn, columns // bk, seed=seed) * columns**-0.5
        scale = torch.exp2(torch.log2(scale).round()) if ue8m0 else scale * 1.1
        stored[f"{name}_scale_inv"] = scale.to(torch.float8_e8m0fnu) if ue8m0 else scale
        values[name] = value * scale.repeat_interleave(bn, 1).repeat_interleave(bk, 2)
    scale_dtype = torch.float8_e8m0fnu if ue8m0 else torch.float32
    scheme = rx.Quantization(fmt, block, scale_dtype=scale_dtype)
    return rx.ExpertWeights(**stored, quantization=scheme, **more), rx.ExpertWeights(**values, **more)


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
