"""Loading a kernel and compiling what it compiles, before the first call that matters."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from routed_experts.loaders.bundles import KERNELS
from routed_experts.loaders.loading import load_kernel
from routed_experts.quantization import Quantization
from routed_experts.weights import ExpertWeights


def warm_up_kernel(
    name: str,
    shape: tuple[int, int, int, int],
    tokens: Iterable[int],
    *,
    quantization: Quantization | None = None,
    device: torch.device | str = "cuda",
    process_group: Any = None,
) -> dict[int, float]:
    """Load a kernel and run its backend once for each number of tokens, on experts of that shape.

    Args:
        name: ``deepgemm``, ``deepgemm_megamoe`` or ``sonicmoe``.
        shape: (E, K, H, I): experts, slots a token, hidden and intermediate size.
        tokens: numbers of tokens; kernels are compiled for sizes of weights and, in steps, for numbers of rows.
        quantization: the format of the experts; None is bfloat16.
        device: where they would run.
        process_group: the ranks of ``deepgemm_megamoe``, all of which must call this.

    Returns:
        Seconds that the first call took, by number of tokens; with no tokens the kernel is only loaded.

    Raises:
        BackendUnavailable: the kernel cannot be had here, or the backend cannot run on this machine.
        RoutedExpertsError: whatever the backend refuses of these experts.
    """
    from routed_experts.moe import run_experts
    from routed_experts.selection import choose

    load_kernel(KERNELS[name].name)
    where, counts = torch.device(device), list(tokens)
    if counts:
        # Refused with a reason before torch stumbles over a device that is not there.
        nothing = stand_in(shape, quantization, torch.device("meta"))
        choose(
            *(nothing, counts[0], shape[1], torch.bfloat16, name), process_group=process_group is not None, device=where
        )
        experts = stand_in(shape, quantization, where)
    seconds = {}
    for count in counts:
        index = torch.arange(count * shape[1], device=device).view(count, shape[1]) % shape[0]
        x = torch.zeros(count, shape[2], dtype=torch.bfloat16, device=device)
        weights = torch.ones(count, shape[1], device=device)
        start = time.perf_counter()
        with torch.no_grad():
            run_experts(x, index, weights, experts, backend=name, process_group=process_group)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds[count] = time.perf_counter() - start
    return seconds


def stand_in(
    shape: tuple[int, int, int, int], quantization: Quantization | None, device: torch.device
) -> ExpertWeights:
    """Return gated experts of zeros, with scales of 1 where they are quantized."""
    count, _, hidden, inner = shape
    tensors: dict[str, Any] = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        if quantization is None:
            tensors[name] = torch.zeros(count, rows, columns, dtype=torch.bfloat16, device=device)
            continue
        width = columns // 2 if quantization.is_fp4 else columns
        codes = torch.zeros(count, rows, width, dtype=torch.uint8, device=device)
        grid = quantization.scale_shape(count, rows, columns, name == "gate_up_proj")
        tensors[name] = codes.view(quantization.weight_dtype)
        tensors[f"{name}_scale_inv"] = torch.ones(grid, device=device).to(quantization.scale_dtype)
    return ExpertWeights(**tensors, quantization=quantization)
