"""The fused kernels as operators, for torch.compile: opaque, with fakes; eager calls do not pass through here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts.compiled import declared, experts_of, is_transposed
from routed_experts.facts import keeps_first_product
from routed_experts.fused_autograd import PARAMETERS
from routed_experts.gates import apply_gate
from routed_experts.weights import WEIGHT_NAMES, ExpertWeights


def traced(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor, *, in_one: bool, training: bool) -> Tensor:
    """Put a fused call into the graph that is being traced; a gate or norm of one's own is traced between operators."""
    tensors, text = experts.tensors(), declared(experts)
    if in_one and not training:
        out: Tensor = torch.ops.routed_experts.fused(x, ids, weights, tensors, text)
        return out

    def step(name: str, x: Tensor, weights: Tensor | None = None) -> Tensor:
        # An operator has a gradient for every tensor that asks for one: those of other steps must not.
        named = zip(WEIGHT_NAMES, tensors[: len(WEIGHT_NAMES)], strict=True)
        own = [t if t is None or of in PARAMETERS[name] else t.detach() for of, t in named]
        out: Tensor = torch.ops.routed_experts.fused_step(name, x, ids, weights, *own, text, keeps_first_product())[0]
        return out

    if in_one:
        return step("whole", x, weights)
    slots = step("down", apply_gate(experts, step("up", x)))
    if experts.post_expert_norm is not None:
        slots = experts.post_expert_norm(slots)
    return step("weigh", slots, weights)


# Triton is an optional package: the bodies import it when they run.


@torch.library.custom_op("routed_experts::fused", mutates_args=())
def _fused(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor | None], text: str) -> Tensor:
    from routed_experts.kernels.fused import run_fused

    return run_fused(experts_of(tensors, text), x, ids, weights)


@torch.library.custom_op("routed_experts::fused_step", mutates_args=())
def _step(
    name: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up_proj: Tensor | None,
    up_proj: Tensor | None,
    down_proj: Tensor | None,
    gate_up_proj_bias: Tensor | None,
    up_proj_bias: Tensor | None,
    down_proj_bias: Tensor | None,
    text: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """A step of ``kernels.training.STEPS``, and the first product that it keeps, empty if it keeps none.

    Its tiles are not kept: how many there are depends on the device, which fakes do not know.
    """
    from routed_experts.kernels.training import forward

    tensors = [gate_up_proj, up_proj, down_proj, gate_up_proj_bias, up_proj_bias, down_proj_bias]
    out, kept = forward(name, experts_of(tensors, text), x, ids, weights, keep)
    return out, x.new_empty(0) if kept.u is None else kept.u


@torch.library.custom_op("routed_experts::fused_step_backward", mutates_args=())
def _step_backward(
    name: str,
    grad: Tensor,
    u: Tensor,
    ids: Tensor,
    x: Tensor,
    weights: Tensor | None,
    tensors: list[Tensor | None],
    text: str,
    needs: list[bool],
) -> list[Tensor]:
    from routed_experts.kernels.training import Kept, backward

    kept = Kept(u if u.numel() else None)
    grads = backward(name, experts_of(tensors, text), x, ids, weights, kept, grad, needs)
    # Operators return tensors only: an empty one stands for a gradient nobody asked for.
    return [x.new_empty(0) if grad is None else grad for grad in grads]


@_fused.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@_step.register_fake
def _(name: str, x: Tensor, ids: Tensor, weights: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    gated, ungated, down, _, _, _, text, keep = rest
    pairs = ids.shape[0] * ids.shape[1]
    up = _columns(ungated if gated is None else gated, text)
    shape = {"up": (pairs, up), "down": (pairs, _columns(down, text)), "weigh": (ids.shape[0], x.shape[1])}
    kept = x.new_empty(pairs, up) if keep and name == "whole" else x.new_empty(0)
    return x.new_empty(shape.get(name, x.shape)), kept


@_step_backward.register_fake
def _(
    name: str, grad: Tensor, u: Tensor, ids: Tensor, x: Tensor, weights: Tensor | None, tensors: Any, *rest: Any
) -> list[Tensor]:
    _, needs = rest
    rows = zip((x, weights), needs[:2], strict=True)
    matrices = zip(tensors, needs[2:], strict=True)
    nothing = x.new_empty(0)
    return [
        *(nothing.clone() if t is None or not need else t.new_empty(t.shape) for t, need in rows),
        *(nothing.clone() if t is None or not need else torch.empty_like(t) for t, need in matrices),
    ]


def _columns(weight: Tensor, text: str) -> int:
    """Columns of the product with a weight; fakes hold no memory, so the checks of real weights cannot run."""
    return weight.shape[2 if is_transposed(text) else 1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    name, x, ids, weights, *tensors, text, _keep = inputs
    ctx.save_for_backward(output[1], ids, x, weights, *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.rest = (name, text)


def _gradients(ctx: Any, grad: Tensor, _grad_u: Tensor) -> tuple[Tensor | None, ...]:
    (name, text), (u, ids, x, weights, *tensors) = ctx.rest, ctx.saved_tensors
    _, of_x, _, of_weights, *of_tensors = ctx.needs_input_grad[: 4 + len(tensors)]
    needs = [of_x, of_weights, *of_tensors]
    backward = torch.ops.routed_experts.fused_step_backward
    grads = backward(name, grad, u, ids, x, weights, tensors, text, needs)
    grad_x, grad_weights, *rest = (one if need else None for one, need in zip(grads, needs, strict=True))
    return None, grad_x, None, grad_weights, *rest, None, None


_step.register_autograd(_gradients, setup_context=_save)
