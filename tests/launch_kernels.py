"""Two tiny Triton kernels for test_launch.py: Triton reads a kernel's source, and only machines with it import this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, value, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + index, tl.load(x + index, mask=index < count) + value, mask=index < count)


@triton.jit
def scale(x, y, factor, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + index, tl.load(x + index, mask=index < count) * factor, mask=index < count)
