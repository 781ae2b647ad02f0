"""The gates of routed_experts/gates.py inside a kernel: float32 in, float32 out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # By the exponential of a negative number, which cannot overflow.
    power = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the named activation of x."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "tanh":
        x = _tanh(x)
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a kernel")
    return x


@triton.jit
def gate_pair(gate, linear, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return the gated unit of two halves; LIMIT and ALPHA are None or the SwiGLU's clamp and slope."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        linear = tl.minimum(linear, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        linear = tl.maximum(linear, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ALPHA is not None:
        result = (linear + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    else:
        result = activate(gate, ACTIVATION) * linear
    return result
