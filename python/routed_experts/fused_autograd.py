"""Autograd of the fused kernels: one function for every step of a call, see kernels/training.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from routed_experts.combine import wants_grad
from routed_experts.errors import LayoutError
from routed_experts.facts import MAIN_GRAD, keeps_first_product, uses_main_gradients
from routed_experts.weights import WEIGHT_NAMES, ExpertWeights, named

# Where the tensors of the experts stand among the arguments of a step: behind x and the routing weights.
_FIRST = 2
# The tensors that a step goes through.
PARAMETERS = {
    "whole": WEIGHT_NAMES,
    "up": ("gate_up_proj", "up_proj", "gate_up_proj_bias", "up_proj_bias"),
    "down": ("down_proj", "down_proj_bias"),
    "weigh": (),
}


def differentiable(step: str, experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Run a step of ``kernels.training.STEPS``; where one is wanted, its result knows its gradients."""
    tensors = experts.tensors()[: len(WEIGHT_NAMES)]
    if not wants_grad(x, weights, *tensors):
        # Triton is an optional package: it is imported when kernels run.
        from routed_experts.kernels import training

        return training.forward(step, experts, x, ids, weights, False)[0]
    out: Tensor = _Step.apply(step, experts.with_tensors({}), ids, x, weights, *tensors)
    return out


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: str, layout: ExpertWeights, ids: Tensor, x: Tensor, weights: Tensor | None, *tensors: Any
    ) -> Tensor:
        from routed_experts.kernels import training

        experts = layout.with_tensors(named(tensors))
        out, kept = training.forward(step, experts, x, ids, weights, keeps_first_product())
        ctx.save_for_backward(ids, *kept, x, weights, *tensors)
        ctx.step, ctx.layout = step, layout
        # Parameters themselves: what is saved may come back as another tensor, without their attributes.
        ctx.parameters = (x, weights, *tensors) if uses_main_gradients() else ()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from routed_experts.kernels import training

        ids, u, tiles, x, weights, *tensors = ctx.saved_tensors
        experts = ctx.layout.with_tensors(named(tensors))
        needs = ctx.needs_input_grad[-_FIRST - len(WEIGHT_NAMES) :]
        mains = _main_gradients(ctx.step, ctx.parameters, needs)
        kept = training.Kept(u, tiles)
        grads = training.backward(ctx.step, experts, x, ids, weights, kept, grad, needs, mains)
        for place in mains:
            grads[place] = _added(ctx.parameters[place])
        return None, None, None, *grads


def _main_gradients(step: str, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> dict[int, Tensor]:
    """The main gradients that matrices of a step have, by position among its arguments.

    Raises:
        LayoutError: one that is not float32, or of another shape or device than its parameter.
    """
    found = {}
    matrices = [name for name in PARAMETERS[step] if not name.endswith("bias")] if parameters else []
    for place in (_FIRST + WEIGHT_NAMES.index(name) for name in matrices):
        parameter = parameters[place]
        main = getattr(parameter, "main_grad", None)
        if main is None or parameter is None or not needs[place] or not parameter.is_leaf:
            continue
        if (main.dtype, main.shape, main.device) != (torch.float32, parameter.shape, parameter.device):
            raise LayoutError(
                "a main gradient that does not fit its parameter",
                found=f"{main.dtype}, {tuple(main.shape)} on {main.device}",
                needed=f"torch.float32, {tuple(parameter.shape)} on {parameter.device}",
                hint=f"allocate main_grad as float32 zeros like the parameter, or unset {MAIN_GRAD}",
            )
        found[place] = main
    return found


def _added(parameter: Any) -> Tensor | None:
    """Tell the framework that the main gradient has it all; what autograd gets for the parameter.

    Megatron marks the parameters whose hooks have to run, by an attribute that says whether the main gradient has
    been added to: those get zeros, so that autograd calls the hooks, and the others nothing.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)
