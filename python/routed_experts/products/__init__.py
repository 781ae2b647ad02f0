"""Products of rows with their experts' matrices, forward and backward, in several ways of doing it.

S rows, E experts, D the width of a row, N the width of a result. A weight is (E, N, D) and y = x @ W.T, or
(E, D, N) transposed and y = x @ W. ``routing`` is what a way goes by: the offsets of rows sorted by expert, or
every row's expert, -1 for none. Rows without an expert read 0 in gradients and in results that are to be
``clean``; otherwise they are left as they were in memory. Weights whose dtype differs from the rows' (autocast)
are cast an expert or a chunk at a time wherever the way allows it. Quantized weights have ways of their own, in
quantized.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.products import copies, gemm, loop
from routed_experts.products.quantized import QUANTIZED_WAYS, QuantizedWay

__all__ = ["QUANTIZED_WAYS", "WAYS", "ExpertLinear", "QuantizedWay", "Way", "gradients", "multiply"]


class Way(NamedTuple):
    """One way to multiply: (x, weight, bias, routing, transposed, clean), and the sums its backward needs."""

    linear: Callable[[Tensor, Tensor, Tensor | None, Tensor, bool, bool], Tensor]
    weight_grad: Callable[[Tensor, Tensor, Tensor, bool, Tensor], Tensor]
    bias_grad: Callable[[Tensor, Tensor, Tensor], Tensor]


WAYS = {
    "loop": Way(loop.linear, loop.weight_grad, loop.bias_grad),
    "torch": Way(gemm.linear, gemm.weight_grad, gemm.bias_grad),
    "copies": Way(copies.linear, copies.weight_grad, copies.bias_grad),
}


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool, way: str, *, clean: bool = True
) -> Tensor:
    """Rows times their experts' matrices: (S, D) -> (S, N)."""
    return WAYS[way].linear(x.contiguous(), weight, bias, routing, transposed, clean)


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Tensor,
    transposed: bool,
    way: str,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of rows, weight and bias; ``needs`` says which are wanted."""
    ways = WAYS[way]
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = ways.linear(grad, weight, None, routing, not transposed, True) if needs[0] else None
    grad_weight = ways.weight_grad(x, grad, routing, transposed, weight) if needs[1] else None
    grad_bias = ways.bias_grad(grad, routing, bias) if needs[2] and bias is not None else None
    return grad_x, grad_weight, grad_bias


class ExpertLinear(torch.autograd.Function):
    """Autograd of :func:`multiply`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool, way: str
    ) -> Tensor:
        """See multiply."""
        ctx.save_for_backward(x, weight, bias, routing)
        ctx.rest = (transposed, way)
        return multiply(x, weight, bias, routing, transposed, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See gradients."""
        x, weight, bias, routing = ctx.saved_tensors
        transposed, way = ctx.rest
        grads = gradients(grad, x, weight, bias, routing, transposed, way, list(ctx.needs_input_grad[:3]))
        return *grads, None, None, None
