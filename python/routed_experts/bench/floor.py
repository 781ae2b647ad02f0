"""What the device can do, measured in the same run, and the time that no kernel gets under.

Floor of a call: the larger of 6*T*K*H*I operations at the rate of a large product and the bytes that must move
(weights of the distinct experts hit, once, and hidden states in and out) at the rate of a large copy. Reading alone is
faster than copying, so a kernel that reads weights all the time can be a little under it. Where the device multiplies
E4M3 numbers, that rate is the one of calls with quantized weights, whatever the tokens are.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from routed_experts.bench.shapes import Shape
from routed_experts.bench.timing import medians

E4M3 = "float8_e4m3fn"
_E4M3_SINCE = (8, 9)  # compute capability


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device: TFLOP/s of a large product by dtype, GB/s of a copy (read and write) and of reading."""

    matmul_tflops: dict[str, float]
    copy_gb_s: float
    read_gb_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Floor:
    """Least microseconds of a call, ``bound`` by "flops" or "bytes", and the two counts."""

    us: float
    bound: str
    bytes: float
    flops: float
    read_us: float  # the same with bytes at the rate of reading

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def measure(device: str, dtypes: list[str], seconds: float) -> Ceilings:
    """Measure the ceilings: products of random matrices of side 8192 and 4 GiB moved (CPU: 512, 64 MiB)."""
    side, count = (8192, 1 << 30) if device == "cuda" else (512, 1 << 24)
    tflops = {name: 2 * side**3 / _product(side, getattr(torch, name), device, seconds) / 1e6 for name in dtypes}
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    moves: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "read": lambda: source.sum()}
    us = medians(moves, 1, device, seconds)
    return Ceilings(tflops, 2 * source.nbytes / us["copy"] / 1e3, source.nbytes / us["read"] / 1e3)


def products(device: str, dtypes: list[str], *, is_quantized: bool) -> list[str]:
    """Return the dtypes of products that a run needs rates of: of tokens, and E4M3 where the device multiplies it."""
    multiplies = is_quantized and device == "cuda" and torch.cuda.get_device_capability() >= _E4M3_SINCE
    return [*dtypes, E4M3] if multiplies else dtypes


def _product(side: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Median microseconds of a product: on a GPU of a burst, for under a long load the card lowers its clock."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> Tensor:
        if dtype.itemsize == 1:
            return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)
        return a @ b.T

    if device == "cpu":
        return medians({"product": product}, 1, device, seconds)["product"]
    for _ in range(3):
        product()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(13)]
    for mark in marks[:-1]:
        mark.record()
        product()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


def floor(
    shape: Shape, tokens: int, dtype: str, experts_hit: float, ceilings: Ceilings, weight_bytes: float | None = None
) -> Floor:
    """Return the floor of calls of ``tokens`` that hit ``experts_hit`` distinct experts in the mean.

    ``weight_bytes`` is the size of an element of quantized weights; others are of ``dtype``, as tokens are.
    """
    size = getattr(torch, dtype).itemsize
    weights = experts_hit * 3 * shape.hidden * shape.inner * (size if weight_bytes is None else weight_bytes)
    moved = weights + size * 2 * tokens * shape.hidden
    flops = 6.0 * tokens * shape.top_k * shape.hidden * shape.inner
    rates = ceilings.matmul_tflops
    for_flops = flops / (rates[dtype] if weight_bytes is None else rates.get(E4M3, rates[dtype])) / 1e6
    for_bytes, for_reading = moved / ceilings.copy_gb_s / 1e3, moved / ceilings.read_gb_s / 1e3
    bound = "flops" if for_flops > for_bytes else "bytes"
    return Floor(max(for_flops, for_bytes), bound, moved, flops, max(for_flops, for_reading))
