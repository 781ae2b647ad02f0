"""Random quantized experts in every format and layout, and what their numbers are in float64.

Written from the formats' definitions and sharing no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import routed_experts as rx

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


@dataclass(frozen=True)
class Stored:
    """A format: its name, the block (None for one scale a matrix), and whether scales are UE8M0."""

    fmt: str
    block: tuple[int, int] | None = None
    ue8m0: bool = False

    def __str__(self) -> str:
        block = "" if self.block is None else "x".join(map(str, self.block))
        return f"{self.fmt}-{block}-{'ue8m0' if self.ue8m0 else 'float32'}"


def scales(shape, ue8m0, generator):
    """Scales as they are stored, and in float64."""
    if ue8m0:
        codes = torch.randint(116, 122, shape, generator=generator, dtype=torch.uint8)
        return codes.view(torch.float8_e8m0fnu), 2.0 ** (codes.double() - 127)
    values = torch.rand(shape, generator=generator) * 0.02 + 0.002
    return values, values.double()


def numbers(shape, is_fp4, generator):
    """Numbers as they are stored, (..., K) or (..., K / 2), and in float64."""
    if not is_fp4:
        stored = (torch.randn(shape, generator=generator) * 3).to(torch.float8_e4m3fn)
        # Subnormal numbers and zeros of both signs are among them.
        stored.view(torch.uint8).flatten()[:6] = torch.tensor([0x01, 0x83, 0x07, 0x00, 0x80, 0x08], dtype=torch.uint8)
        return stored, stored.double()
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    values = E2M1[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8), values


def matrix(stored, shape, is_gated, is_concatenated, generator):
    """One projection (E, N, K): (numbers, scales, float64)."""
    experts, n, k = shape
    weight, values = numbers(shape, stored.fmt == "mxfp4", generator)
    if stored.block is None:
        inverse, wide = scales((experts, 2 if is_gated else 1, 1), stored.ue8m0, generator)
        column = torch.arange(n)
        part = (column >= n // 2).long() if is_concatenated else column % 2
        return weight, inverse, values * (wide[:, part if is_gated else part * 0])
    bn, bk = stored.block
    halves = 2 if is_gated and is_concatenated else 1  # blocks begin anew in the second half
    inverse, wide = scales((experts, halves * -(-n // halves // bn), -(-k // bk)), stored.ue8m0, generator)
    spread = torch.cat([part.repeat_interleave(bn, 1)[:, : n // halves] for part in wide.chunk(halves, 1)], 1)
    spread = spread.repeat_interleave(bk, 2)[:, :, :k]
    return weight, inverse, values * spread


def build(stored, *, experts=4, hidden=64, inner=32, seed=0, bias=False, dtype=torch.bfloat16, **flags):
    """ExpertWeights, and the tensors of the oracle: float64, in the declared layout."""
    g = torch.Generator().manual_seed(seed)
    has_gate, transposed = flags.pop("has_gate", True), flags.get("is_transposed", False)
    concatenated = flags.get("is_concatenated", True)
    name = "gate_up_proj" if has_gate else "up_proj"
    shapes = {name: (experts, inner * (1 + has_gate), hidden), "down_proj": (experts, hidden, inner)}
    given, wide = {}, {}
    for projection, shape in shapes.items():
        weight, inverse, values = matrix(stored, shape, projection == "gate_up_proj", concatenated, g)
        if transposed:
            weight, values = (t.mT.contiguous() for t in (weight.view(torch.uint8), values))
            weight = weight.view(torch.float8_e4m3fn)
            # One scale for each half is not a grid of blocks, and stays as it is.
            inverse = inverse if stored.block is None else _bytes(inverse).mT.contiguous()
            inverse = inverse.view(torch.float8_e8m0fnu) if stored.ue8m0 else inverse
        given |= {projection: weight, projection + "_scale_inv": inverse}
        wide[projection] = values
        if bias:
            given[projection + "_bias"] = wide[projection + "_bias"] = torch.randn(shape[:2], generator=g).to(dtype)
    scheme = rx.Quantization(
        fmt=stored.fmt, block=stored.block, scale_dtype=torch.float8_e8m0fnu if stored.ue8m0 else torch.float32
    )
    return rx.ExpertWeights(**given, quantization=scheme, **flags), wide


def _bytes(scale):
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def routing(tokens, top_k, experts, hidden, dtype, seed=1, *, sentinels=False):
    """Tokens (T, H), ids and routing weights (T, K); with sentinels, some ids belong to nobody."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    low, high = (-1, experts + 1) if sentinels else (0, experts)
    ids = torch.randint(low, high, (tokens, top_k), generator=g)
    return x, ids, torch.rand(tokens, top_k, generator=g)
