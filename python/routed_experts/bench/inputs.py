"""What a call is made of, drawn where it is used: tens of GB of weights never cross the bus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from routed_experts.bench.recorded import Recorded
from routed_experts.bench.shapes import Shape
from routed_experts.errors import UnsupportedScheme

# A key of ROUTINGS, or what a file holds.
Routing: TypeAlias = "str | Recorded"

# Popularity of experts as a standard deviation of their logits' bias; trained routers have one.
ROUTINGS = {"skewed": 0.8, "balanced": 0.0}


class Inputs(NamedTuple):
    """One input set: x (T, H), expert ids (T, K) and their weights (T, K), normalised."""

    x: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody asks for
    weights: Tensor


class Experts(torch.nn.Module):
    """An experts module as transformers' functions expect it; weights of unit gain."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str):
        super().__init__()
        experts, _, hidden, inner = shape
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            drawn = torch.empty(experts, rows, columns, dtype=dtype, device=device)
            for matrix in drawn:  # one by one: a float32 copy of the whole may not fit
                matrix.copy_(torch.randn(rows, columns, device=device, generator=generator).mul_(columns**-0.5))
            return torch.nn.Parameter(drawn, requires_grad=False)

        self.num_experts = experts
        self.gate_up_proj, self.down_proj = weight(2 * inner, hidden), weight(hidden, inner)
        self.act_fn = F.silu
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = self.has_post_expert_norm = self._is_expert_parallel = False
        self.config = SimpleNamespace(hidden_act="silu", _experts_implementation=None)

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, linear = up.chunk(2, -1)
        return self.act_fn(gate) * linear


def count(tokens: int, device: str) -> int:
    """How many input sets a time is taken over: enough that no call finds its weights in a cache by luck."""
    if device == "cpu":
        return 2
    return 8 if tokens <= 64 else 4 if tokens <= 512 else 2


def quantized(weights: Any, fmt: str) -> Any:
    """Return ``weights`` in a format of quantize_experts, or as they are for "none"."""
    if fmt == "none":
        return weights
    import routed_experts as rx

    if not hasattr(rx, "quantize_experts"):
        raise UnsupportedScheme(
            "experts cannot be quantized here",
            found=f"routed-experts {rx.__version__}",
            needed="a version with quantize_experts",
            hint="leave --quantizations out",
        )
    return rx.quantize_experts(weights, fmt)


def draw(shape: Shape, dtype: torch.dtype, tokens: int, routing: Routing, device: str) -> list[Inputs]:
    """Return input sets of other tokens and other routing, experts alike in popularity."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    popularity = 0 if isinstance(routing, Recorded) else ROUTINGS[routing] * normal(shape.experts)
    sets = []
    for number in range(count(tokens, device)):
        if isinstance(routing, Recorded):
            index, weights = (t.to(device) for t in routing.take(tokens, number, shape.experts, shape.top_k))
        else:
            logits = normal(tokens, shape.experts) + popularity
            weights, index = logits.softmax(-1).topk(shape.top_k, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
        sets.append(Inputs(normal(tokens, shape.hidden).to(dtype), index, weights.to(dtype)))
    return sets


def load(sets: list[Inputs], experts: int) -> tuple[float, float]:
    """Return the mean number of distinct experts hit, and the largest load of one as a multiple of the mean."""
    counts = torch.stack([one.index.flatten().bincount(minlength=experts) for one in sets]).float()
    busiest = counts.amax(1) / counts.mean(1)
    return (counts > 0).sum(1).float().mean().item(), busiest.mean().item()


def reference(layer: Experts, inputs: Inputs) -> Tensor:
    """A float32 loop over the experts hit, (T, H)."""
    out = torch.zeros(inputs.x.shape, device=inputs.x.device)
    for expert in inputs.index.unique().tolist():
        token, slot = torch.where(inputs.index == expert)
        up = inputs.x[token].float() @ layer.gate_up_proj[expert].float().T
        gate, linear = up.chunk(2, -1)
        down = (F.silu(gate) * linear) @ layer.down_proj[expert].float().T
        out.index_add_(0, token, down * inputs.weights[token, slot, None].float())
    return out
