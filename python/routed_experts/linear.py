"""The products with autograd: a function in eager calls, an opaque operator in compiled ones.

An operator costs 7-20 us a call in eager mode, so only the compiler sees it; tracing would otherwise follow
the loops into the data and break the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from routed_experts import products
from routed_experts.combine import wants_grad
from routed_experts.products.quantized import QuantizedLinear, multiply_quantized, quantized_gradients
from routed_experts.quantization.stacks import Stack, stack_of

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights


def up_product(experts: ExpertWeights, x: Tensor, routing: Tensor, way: str) -> Tensor:
    """Rows times the first projection of their experts, bias included: (S, H) -> (S, N)."""
    if experts.quantization is not None:
        return quantized_linear(x, stack_of(experts, True), experts.up_bias, routing, experts.is_transposed, way)
    return expert_linear(x, experts.up_weight, experts.up_bias, routing, experts.is_transposed, way)


def down_product(experts: ExpertWeights, x: Tensor, routing: Tensor, way: str) -> Tensor:
    """Rows times the second projection of their experts, bias included: (S, I) -> (S, H)."""
    bias = experts.down_proj_bias
    if experts.quantization is not None:
        return quantized_linear(x, stack_of(experts, False), bias, routing, experts.is_transposed, way)
    return expert_linear(x, experts.down_weight, bias, routing, experts.is_transposed, way)


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


def quantized_linear(
    x: Tensor, stack: Stack, bias: Tensor | None, routing: Tensor, transposed: bool, way: str
) -> Tensor:
    """Do what expert_linear does with quantized matrices, in one of the ways of ``products.QUANTIZED_WAYS``."""
    if torch.compiler.is_compiling():
        declared = (stack.fmt, list(stack.block), stack.interleaved)
        return torch.ops.routed_experts.quantized_linear(
            x, bias, stack.weight, stack.scale, *declared, routing, transposed, way
        )
    if wants_grad(x, bias):
        return QuantizedLinear.apply(x, bias, stack, routing, transposed, way)
    return multiply_quantized(x, stack, bias, routing, transposed, way, clean=False)


def _stack(weight: Tensor, scale: Tensor, fmt: str, block: list[int], interleaved: bool) -> Stack:
    return Stack(weight, scale, fmt, (block[0], block[1]), interleaved)


@torch.library.custom_op("routed_experts::quantized_linear", mutates_args=())
def _quantized(
    x: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    fmt: str,
    block: list[int],
    interleaved: bool,
    routing: Tensor,
    transposed: bool,
    way: str,
) -> Tensor:
    return multiply_quantized(x, _stack(weight, scale, fmt, block, interleaved), bias, routing, transposed, way)


@_quantized.register_fake
def _(x: Tensor, bias: Tensor | None, weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    stack, transposed = _stack(weight, scale, *rest[:3]), rest[4]
    return x.new_empty(x.shape[0], stack.shape[2 if transposed else 1])


@torch.library.custom_op("routed_experts::quantized_linear_backward", mutates_args=())
def _quantized_backward(
    grad: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    routing: Tensor,
    fmt: str,
    block: list[int],
    interleaved: bool,
    transposed: bool,
    way: str,
    needs: list[bool],
) -> list[Tensor]:
    stack = _stack(weight, scale, fmt, block, interleaved)
    grads = quantized_gradients(grad, stack, bias, routing, transposed, way, needs)
    return [grad.new_empty(0) if found is None else found for found in grads]


@_quantized_backward.register_fake
def _(grad: Tensor, bias: Tensor | None, weight: Tensor, scale: Tensor, *rest: Any) -> list[Tensor]:
    stack, transposed, needs = _stack(weight, scale, *rest[1:4]), rest[4], rest[6]
    rows = grad.new_empty(grad.shape[0], stack.shape[1 if transposed else 2]) if needs[0] else grad.new_empty(0)
    return [rows, torch.empty_like(bias) if needs[1] and bias is not None else grad.new_empty(0)]


def _save_quantized(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, weight, scale, fmt, block, interleaved, routing, transposed, way = inputs
    ctx.save_for_backward(bias, weight, scale, routing)
    ctx.rest = (fmt, block, interleaved, transposed, way)


def _quantized_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:2])
    operator = torch.ops.routed_experts.quantized_linear_backward
    grads = operator(grad, *ctx.saved_tensors, *ctx.rest, needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 8


_quantized.register_autograd(_quantized_grads, setup_context=_save_quantized)
