"""Sizes of the expert layers of well-known models, and the best kernel published for each."""

from __future__ import annotations

from typing import NamedTuple

import click


class Shape(NamedTuple):
    """E experts, K of them a token, H hidden and I intermediate size."""

    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen1.5-moe": Shape(60, 4, 2048, 1408),
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "mixtral-eighth": Shape(8, 2, 2048, 3584),
    "mixtral": Shape(8, 2, 4096, 14336),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
    "gpt-oss-like": Shape(128, 4, 2880, 2880),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "olmoe": Shape(64, 8, 2048, 1024),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "phi-3.5-moe": Shape(16, 2, 4096, 6400),
    "glm-4.5-air": Shape(128, 8, 4096, 1408),
    "qwen3-235b": Shape(128, 8, 4096, 1536),
    "qwen3-next-80b": Shape(512, 10, 2048, 512),
}
DEFAULTS = {
    "cpu": ("qwen1.5-moe", "qwen3-30b", "mixtral-eighth"),
    "cuda": ("qwen1.5-moe", "qwen3-30b", "mixtral", "deepseek-v3", "gpt-oss-like"),
}

# The best of vLLM's Triton kernel, triton_kernels, SonicMoE and others, as a multiple of its floor (floor.py), the
# smaller of eager and graph; bfloat16, skewed routing; measured on one H200, 2026-11-30. For FP8 weights in blocks of
# 128 by 128 the best of vLLM's Triton and DeepGEMM paths and finegrained-fp8.
PUBLISHED = {
    "none": {
        "qwen1.5-moe": {1: 1.83, 8: 1.30, 64: 1.15, 512: 1.23, 4096: 1.82, 16384: 1.29},
        "qwen3-30b": {1: 1.71, 8: 1.24, 64: 1.22, 512: 1.25, 4096: 1.94, 16384: 1.45},
        "mixtral": {1: 1.11, 8: 1.03, 64: 1.06, 512: 1.58, 4096: 1.26, 16384: 1.20},
        "deepseek-v3": {1: 1.13, 8: 1.02, 64: 0.97, 512: 1.08, 4096: 1.77, 16384: 1.48},
        "gpt-oss-like": {1: 1.32, 8: 1.14, 64: 1.03, 512: 1.11, 4096: 1.71, 16384: 1.48},
    },
    "fp8_block": {
        "qwen3-30b": {1: 2.91, 8: 1.61, 64: 1.37, 512: 1.79, 4096: 2.67, 16384: 2.05},
        "deepseek-v3": {1: 1.21, 8: 1.21, 64: 1.02, 512: 1.22, 4096: 1.90, 16384: 1.67},
    },
}


def published(
    shape: str, device: str, dtype: str, tokens: int, routing: str, quantization: str = "none"
) -> float | None:
    """Return the best published multiple of the floor, None where nothing comparable was measured."""
    if (device, dtype, routing) != ("cuda", "bfloat16", "skewed"):
        return None
    return PUBLISHED.get(quantization, {}).get(shape, {}).get(tokens)


def chosen(names: str | None, sizes: tuple[str, ...], device: str, most: int | None = None) -> dict[str, Shape]:
    """Return the shapes of ``--shapes`` and ``--shape``; of neither, the first ``most`` of the device's (all)."""
    if names is None:
        names = "" if sizes else ",".join(DEFAULTS[device][:most])
    found = {}
    for name in filter(None, names.split(",")):
        if name not in SHAPES:
            raise click.UsageError(f"no shape {name!r}; there are {', '.join(SHAPES)}, or give --shape E,K,H,I")
        found[name] = SHAPES[name]
    return found | {text: _parse(text) for text in sizes}


def _parse(text: str) -> Shape:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise click.UsageError(f"--shape {text!r} is not four whole numbers above 0, E,K,H,I")
    shape = Shape(*map(int, parts))
    if shape.top_k > shape.experts:
        raise click.UsageError(f"--shape {text!r} asks for more experts a token (K) than there are (E)")
    # Bytes of the larger projection in float32, the widest dtype that is measured.
    if 4 * shape.experts * 2 * shape.inner * shape.hidden >= 2**63:
        raise click.UsageError(f"--shape {text!r} is too large for any tensor")
    return shape
