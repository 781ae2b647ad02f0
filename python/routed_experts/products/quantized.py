"""Products with quantized matrices: what a stack stores is dequantized where and when it is multiplied.

``QUANTIZED_WAYS`` is where such a product is provided: a name for the rows of a backend, and the functions behind it.
The two here run on every device, an expert or a chunk of pairs at a time:

* ``loop`` dequantizes every expert that is hit once a call. Scratch: one matrix in float32, and one in the dtype of the
  rows where that is another (FP4: and a 32-bit index for every byte).
* ``copies`` dequantizes a matrix for every pair, in chunks whose bytes, as :func:`matrix_bytes` counts them, stay
  under ROUTED_EXPERTS_BATCHED_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.products import copies, loop
from routed_experts.quantization.codes import from_e2m1
from routed_experts.quantization.stacks import Stack


class QuantizedWay(NamedTuple):
    """One way to multiply rows (S, D) by quantized matrices: (x, stack, bias, routing, transposed, clean) -> (S, N).

    ``routing``, ``transposed`` and ``clean`` mean what they do for plain matrices. ``input_grad`` is called the same
    way with the gradient of the result, no bias, and ``transposed`` the other way round.
    """

    linear: Callable[[Tensor, Stack, Tensor | None, Tensor, bool, bool], Tensor]
    input_grad: Callable[[Tensor, Stack, Tensor | None, Tensor, bool, bool], Tensor]
    bias_grad: Callable[[Tensor, Tensor, Tensor], Tensor]


class _OneByOne:
    """A stack as ``loop`` reads it: a matrix at a time, in the same scratch, valid until the next one."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        self._stack = stack
        self.shape = stack.shape
        self._float = torch.empty(stack.shape[1:], dtype=torch.float32, device=stack.weight.device)
        self._cast = None if dtype == torch.float32 else torch.empty_like(self._float, dtype=dtype)

    def __getitem__(self, expert: int) -> Tensor:
        stored = self._stack.weight[expert]
        self._float.copy_(from_e2m1(stored) if stored.dtype == torch.int8 else stored)
        value = self._stack.scaled(self._float, expert)
        return value if self._cast is None else self._cast.copy_(value)


class _Chosen:
    """A stack as ``copies`` reads it: a chunk of matrices at a time."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        self._stack, self._dtype = stack, dtype
        self.shape = stack.shape
        self.matrix_bytes = matrix_bytes(stack, dtype)

    def take(self, expert: Tensor) -> Tensor:
        return self._stack.values(expert).to(self._dtype)


def matrix_bytes(stack: Stack, dtype: torch.dtype) -> int:
    """Return the bytes that are held at once for a copied matrix: stored, indexed, in float32, and cast."""
    _, rows, columns = stack.shape
    packed = stack.weight.dtype == torch.int8
    stored = stack.weight.shape[1] * stack.weight.shape[2] * (5 if packed else 1)
    return stored + rows * columns * (4 + (0 if dtype == torch.float32 else dtype.itemsize))


def _loop(x: Tensor, stack: Stack, bias: Tensor | None, offsets: Tensor, transposed: bool, clean: bool) -> Tensor:
    return loop.linear(x, _OneByOne(stack, x.dtype), bias, offsets, transposed, clean)


def _copies(x: Tensor, stack: Stack, bias: Tensor | None, expert: Tensor, transposed: bool, clean: bool) -> Tensor:
    return copies.linear(x, _Chosen(stack, x.dtype), bias, expert, transposed, clean)


QUANTIZED_WAYS = {
    "loop": QuantizedWay(_loop, _loop, loop.bias_grad),
    "copies": QuantizedWay(_copies, _copies, copies.bias_grad),
}


def multiply_quantized(
    x: Tensor, stack: Stack, bias: Tensor | None, routing: Tensor, transposed: bool, way: str, *, clean: bool = True
) -> Tensor:
    """Rows times their experts' dequantized matrices: (S, D) -> (S, N)."""
    return QUANTIZED_WAYS[way].linear(x.contiguous(), stack, bias, routing, transposed, clean)


def quantized_gradients(
    grad: Tensor, stack: Stack, bias: Tensor | None, routing: Tensor, transposed: bool, way: str, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of rows and bias; ``needs`` says which are wanted."""
    ways, grad = QUANTIZED_WAYS[way], grad.contiguous()
    grad_x = ways.input_grad(grad, stack, None, routing, not transposed, True) if needs[0] else None
    grad_bias = ways.bias_grad(grad, routing, bias) if needs[1] and bias is not None else None
    return grad_x, grad_bias


class QuantizedLinear(torch.autograd.Function):
    """Autograd of :func:`multiply_quantized`: gradients to rows and bias, none to what is quantized."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, stack: Stack, routing: Tensor, transposed: bool, way: str
    ) -> Tensor:
        """See multiply_quantized."""
        ctx.save_for_backward(bias, routing, stack.weight, stack.scale)
        ctx.rest = (stack[2:], transposed, way)
        return multiply_quantized(x, stack, bias, routing, transposed, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See quantized_gradients."""
        bias, routing, weight, scale = ctx.saved_tensors
        declared, transposed, way = ctx.rest
        stack, needs = Stack(weight, scale, *declared), list(ctx.needs_input_grad[:2])
        return *quantized_gradients(grad, stack, bias, routing, transposed, way, needs), None, None, None, None
