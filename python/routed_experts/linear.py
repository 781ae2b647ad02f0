"""The products with autograd: a function in eager calls, an opaque operator in compiled ones.

An operator costs 7-20 us a call in eager mode, so only the compiler sees it; tracing would otherwise follow
the loops into the data and break the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts import products
from routed_experts.combine import wants_grad


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool, way: str
) -> Tensor:
    """Rows times their experts' matrices, (S, D) -> (S, N), in one of the ways of ``products.WAYS``.

    Rows without an expert are only cleared where a backward could carry what they hold into a gradient.
    """
    if torch.compiler.is_compiling():
        return torch.ops.routed_experts.expert_linear(x, weight, bias, routing, transposed, way)
    if wants_grad(x, weight, bias):
        return products.ExpertLinear.apply(x, weight, bias, routing, transposed, way)
    return products.multiply(x, weight, bias, routing, transposed, way, clean=False)


@torch.library.custom_op("routed_experts::expert_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool, way: str) -> Tensor:
    return products.multiply(x, weight, bias, routing, transposed, way)


@torch.library.custom_op("routed_experts::expert_linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Tensor,
    transposed: bool,
    way: str,
    needs: list[bool],
) -> list[Tensor]:
    grads = products.gradients(grad, x, weight, bias, routing, transposed, way, needs)
    # Operators return tensors only: an empty one stands for a gradient nobody asked for.
    return [x.new_empty(0) if grad is None else grad for grad in grads]


_linear.register_fake(
    lambda x, weight, bias, routing, transposed, way: x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
)


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    needs = rest[-1]
    wanted = zip((x, weight, bias), needs, strict=True)
    return [x.new_empty(0) if t is None or not need else torch.empty_like(t) for t, need in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.routed_experts.expert_linear_backward(grad, *ctx.saved_tensors, *ctx.rest, needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None, None


_linear.register_autograd(_gradients, setup_context=_save)
