"""Correctness before speed: what is wrong on any input set has no time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from routed_experts.bench.inputs import Inputs

# norm(out - reference) / norm(reference). Two roundings of unit-scale sums are 4e-3 in bfloat16; TF32 is 3e-4.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}

# Quantized weights beside eager over the same ones, which never rounds tokens to a format: a backend may.
QUANTIZED = 5e-2


class WrongAnswer(Exception):
    """An output too far from the reference."""


def distance(out: Tensor, wanted: Tensor) -> float:
    """Return norm(out - wanted) / norm(wanted); NaN where the output holds one."""
    return ((out.float() - wanted).norm() / wanted.norm()).item()


def check(out: Tensor, wanted: Tensor, dtype: torch.dtype, tolerance: float | None = None) -> float:
    """Return the distance, or raise WrongAnswer when it is over the tolerance (the dtype's), NaN included."""
    found, allowed = distance(out, wanted), TOLERANCE[dtype] if tolerance is None else tolerance
    if out.dtype != dtype or not found <= allowed:
        kind = f"{out.dtype}"[6:]
        raise WrongAnswer(f"{kind} result, {found:.2e} from float32, allowed {allowed:.0e}")
    return found


def largest_error(
    function: Callable[..., Tensor],
    sets: list[Inputs],
    wanted: list[Tensor],
    scratch: int,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> float:
    """Run every input set on poisoned memory and return the largest distance from the reference."""
    errors = []
    for inputs, answer in zip(sets, wanted, strict=True):
        poison(inputs.x.device, scratch)
        errors.append(check(function(*inputs), answer, dtype, tolerance))
    return max(errors)


def poison(device: torch.device, scratch: int) -> None:
    """Leave memory behind that reads NaN in every floating dtype: a result that nobody wrote shows.

    ``scratch`` is the size in bytes of the largest tensor that the call needs. Blocks are held together, so that
    each is another one, and then freed together: small ones of every size, and room for three large ones.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else free blocks that hold an earlier answer would be found first
        scratch = max(scratch, 1 << 25)
    sizes = [2**power for power in range(9, 21)] + [scratch]
    held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes for _ in range(3)]
    del held
