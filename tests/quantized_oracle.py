"""Dequantization from the bits, in float64, sharing no code with the package."""

from __future__ import annotations

import torch

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(weight):
    bits = weight.view(torch.uint8).long()
    sign = 1.0 - 2.0 * (bits >> 7)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).double()
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    value = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return sign * value.masked_fill((bits & 127) == 127, float("nan"))


def e2m1(weight):
    bits = weight.view(torch.uint8).long()
    table = torch.tensor(FP4 + [-value for value in FP4], dtype=torch.float64)
    return torch.stack((table[bits & 15], table[bits >> 4]), dim=-1).flatten(-2)


def scale(scale_inv):
    if scale_inv.dtype == torch.float32:
        return scale_inv.double()
    return 2.0 ** (scale_inv.view(torch.uint8).double() - 127)


def matrix(weight, scale_inv, block, *, halves, interleaved, transposed):
    """Return the values of a stack, (E, N, K), or (E, K, N) transposed; ``block`` None is a scale a matrix or half."""
    value = e2m1(weight) if weight.dtype == torch.int8 else e4m3(weight)
    value = value.mT if transposed else value
    grid = scale(scale_inv)
    rows, columns = torch.arange(value.shape[1]), torch.arange(value.shape[2])
    inner = value.shape[1] // 2
    if block is None:
        half = rows % 2 if interleaved else rows // inner
        at = half if halves else rows * 0, columns * 0
    else:
        grid = grid.mT if transposed else grid
        at = rows // (min(block[0], inner) if halves else block[0]), columns // block[1]
    value = value * grid[:, at[0]][:, :, at[1]]
    return value.mT if transposed else value


def tensors_of(experts):
    """Return the keyword tensors of ExpertWeights with every quantized one as float64."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    block = experts.quantization.block
    found = {}
    for name, halves in ((up, experts.has_gate), ("down_proj", False)):
        found[name] = matrix(
            getattr(experts, name),
            getattr(experts, f"{name}_scale_inv"),
            block,
            halves=halves,
            interleaved=halves and not experts.is_concatenated,
            transposed=experts.is_transposed,
        )
    for name in (f"{up}_bias", "down_proj_bias"):
        if getattr(experts, name) is not None:
            found[name] = getattr(experts, name)
    return found
