"""The judge: a plain loop over pairs in float64, written from the formula and sharing no code with the package."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def act(name, x):
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    if name == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if name == "relu2":
        return torch.where(x > 0, x, torch.zeros_like(x)) ** 2
    raise KeyError(name)


def gated(u, *, activation, interleaved, limit, alpha):
    half = u.shape[-1] // 2
    g, v = (u[..., 0::2], u[..., 1::2]) if interleaved else (u[..., :half], u[..., half:])
    if limit is not None:
        g = torch.minimum(g, torch.full_like(g, limit))
        v = torch.maximum(torch.minimum(v, torch.full_like(v, limit)), torch.full_like(v, -limit))
    if alpha is not None:
        return (v + 1) * g / (1 + torch.exp(-alpha * g))
    return act(activation, g) * v


def experts_oracle(x, index, weights, tensors, flags, *, weights_on="output", kinks=None):
    """Return (T, H) in float64; ``tensors`` and ``flags`` are the keyword arguments of ExpertWeights.

    ``kinks``, a list, collects how near the values came to a clamp, where the gradient jumps.
    """
    double = {name: None if t is None else t.double() for name, t in tensors.items()}
    x, weights = x.double(), weights.double()
    gate = flags.get("gate")
    norm = flags.get("post_expert_norm")
    up_name = "gate_up_proj" if double.get("gate_up_proj") is not None else "up_proj"
    up, down = double[up_name], double["down_proj"]
    up_bias, down_bias = double.get(up_name + "_bias"), double.get("down_proj_bias")
    if not flags.get("is_transposed", False):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for j in range(index.shape[1]):
            e = int(index[t, j])
            if not 0 <= e < up.shape[0]:
                continue
            row = x[t] * weights[t, j] if weights_on == "input" else x[t]
            u = row @ up[e]
            u = u if up_bias is None else u + up_bias[e]
            if kinks is not None and flags.get("swiglu_limit") is not None:
                kinks.append((u.detach().abs() - flags["swiglu_limit"]).abs().min().item())
            if gate is not None:
                a = gate(u[None])[0]
            elif up_name == "gate_up_proj":
                a = gated(
                    u,
                    activation=flags.get("activation", "silu"),
                    interleaved=not flags.get("is_concatenated", True),
                    limit=flags.get("swiglu_limit"),
                    alpha=flags.get("swiglu_alpha"),
                )
            else:
                a = act(flags.get("activation", "silu"), u)
            d = a @ down[e]
            d = d if down_bias is None else d + down_bias[e]
            d = d if norm is None else norm(d[None])[0]
            total = total + (d if weights_on == "input" else d * weights[t, j])
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


def relative_error(got, wanted):
    """Largest difference relative to the largest wanted magnitude (1 where everything wanted is 0)."""
    if wanted.numel() == 0:
        return 0.0
    scale = wanted.abs().max().item() or 1.0
    difference = (got.double() - wanted).abs()
    assert not difference.isnan().any(), "NaN in the result"
    return difference.max().item() / scale
