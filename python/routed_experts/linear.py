"""The products of products.py with autograd: a function in eager calls, an opaque operator in compiled ones.

An operator costs 7-20 us a call in eager mode, so only the compiler sees it; tracing would otherwise follow
the loops into the data and break the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts import products
from routed_experts.combine import wants_grad


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, kernel: str
) -> Tensor:
    """Rows sorted by expert times their experts' matrices: (S, D) -> (S, N), 0 past the last offset."""
    if torch.compiler.is_compiling():
        return torch.ops.routed_experts.grouped_linear(x, weight, bias, offsets, transposed, kernel)
    if wants_grad(x, weight, bias):
        return products.GroupedLinear.apply(x, weight, bias, offsets, transposed, kernel)
    return products.grouped_forward(x, weight, bias, offsets, transposed, kernel)


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool) -> Tensor:
    """Rows in any order times copies of their experts' matrices: (S, D) -> (S, N), 0 where expert is -1."""
    if torch.compiler.is_compiling():
        return torch.ops.routed_experts.batched_linear(x, weight, bias, expert, transposed)
    if wants_grad(x, weight, bias):
        return products.BatchedLinear.apply(x, weight, bias, expert, transposed)
    return products.batched_forward(x, weight, bias, expert, transposed)


def _fake_linear(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


def _as_list(grads: tuple[Tensor | None, ...], x: Tensor) -> list[Tensor]:
    # Operators return tensors only: an empty one stands for a gradient nobody asked for.
    return [x.new_empty(0) if grad is None else grad for grad in grads]


def _fake_grads(x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> list[Tensor]:
    wanted = (x, weight, bias)
    return [
        x.new_empty(0) if t is None or not need else _like_gradient(t) for t, need in zip(wanted, needs, strict=True)
    ]


def _like_gradient(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _from_list(grads: list[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


@torch.library.custom_op("routed_experts::grouped_linear", mutates_args=())
def _grouped_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, kernel: str
) -> Tensor:
    return products.grouped_forward(x, weight, bias, offsets, transposed, kernel)


@_grouped_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, kernel: str) -> Tensor:
    return _fake_linear(x, weight, transposed)


@torch.library.custom_op("routed_experts::grouped_linear_backward", mutates_args=())
def _grouped_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    kernel: str,
    needs: list[bool],
) -> list[Tensor]:
    return _as_list(products.grouped_backward(grad, x, weight, bias, offsets, transposed, kernel, needs), x)


@_grouped_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    kernel: str,
    needs: list[bool],
) -> list[Tensor]:
    return _fake_grads(x, weight, bias, needs)


@torch.library.custom_op("routed_experts::batched_linear", mutates_args=())
def _batched_op(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool) -> Tensor:
    return products.batched_forward(x, weight, bias, expert, transposed)


@_batched_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, transposed: bool) -> Tensor:
    return _fake_linear(x, weight, transposed)


@torch.library.custom_op("routed_experts::batched_linear_backward", mutates_args=())
def _batched_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    return _as_list(products.batched_backward(grad, x, weight, bias, expert, transposed, needs), x)


@_batched_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    return _fake_grads(x, weight, bias, needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _grouped_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.routed_experts.grouped_linear_backward(grad, *ctx.saved_tensors, *ctx.rest, needs)
    return *_from_list(grads, needs), None, None, None


def _batched_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.routed_experts.batched_linear_backward(grad, *ctx.saved_tensors, *ctx.rest, needs)
    return *_from_list(grads, needs), None, None


_grouped_op.register_autograd(_grouped_grads, setup_context=_save)
_batched_op.register_autograd(_batched_grads, setup_context=_save)
