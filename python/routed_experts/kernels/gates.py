"""The gates of routed_experts/gates.py inside a kernel, and their derivatives: float32 in, float32 out."""

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


@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative of the named activation at x; as in torch, 0 where relu's has none."""
    if ACTIVATION == "silu":
        part = tl.sigmoid(x)
        slope = part * (1.0 + x * (1.0 - part))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        part = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + part) + 0.5 * x * (1.0 - part * part) * inner
    elif ACTIVATION == "quick_gelu":
        part = tl.sigmoid(1.702 * x)
        slope = part * (1.0 + 1.702 * x * (1.0 - part))
    elif ACTIVATION == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        slope = 2.0 * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "sigmoid":
        part = tl.sigmoid(x)
        slope = part * (1.0 - part)
    elif ACTIVATION == "tanh":
        part = _tanh(x)
        slope = 1.0 - part * part
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a kernel")
        slope = tl.full(x.shape, 1.0, tl.float32)
    return slope


@triton.jit
def gate_slopes(gate, linear, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return the derivatives of :func:`gate_pair` by both halves; as torch's clamp, 1 at the limit and 0 behind it."""
    clamped_gate, clamped = gate, linear
    if LIMIT is not None:
        clamped_gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        clamped = tl.minimum(linear, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        clamped = tl.maximum(clamped, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ALPHA is not None:
        part = tl.sigmoid(ALPHA * clamped_gate)
        by_gate = (clamped + 1.0) * part * (1.0 + ALPHA * clamped_gate * (1.0 - part))
        by_linear = clamped_gate * part
    else:
        by_gate = activation_slope(clamped_gate, ACTIVATION) * clamped
        by_linear = activate(clamped_gate, ACTIVATION)
    if LIMIT is not None:
        by_gate = tl.where(gate > LIMIT, 0.0, by_gate)
        by_linear = tl.where((linear > LIMIT) | (linear < -LIMIT), 0.0, by_linear)
    return by_gate, by_linear
