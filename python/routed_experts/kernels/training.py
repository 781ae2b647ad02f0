"""Calls that will be differentiated: what a forward leaves for its backward, and the backwards.

A call is one step (``whole``) or, with a gate or norm of one's own between, three (``up``, ``down``, ``weigh``).
T tokens, K slots, S = T*K pairs, H hidden and I intermediate size, N = 2I gated, else I.

Memory of ``whole``, in bytes, b of the dtype of the products. From forward to backward there stay the inputs, which
others hold as well, the first product (b*S*N; nothing with ROUTED_EXPERTS_FUSED_RECOMPUTE, at the price of computing
it once more) and the list of tiles (4*S and a little). Forward takes b*S*(I + H) for its time; backward
b*S*(N + I + H) and the gradients themselves. Nothing depends on the routing, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.kernels import gradient_launches, mlp, steps
from routed_experts.kernels.backward import Backward, Grads
from routed_experts.kernels.choice import Choice, choose, sizes_of, smaller_choices
from routed_experts.kernels.constants import settle
from routed_experts.kernels.fused import limits, run_smaller
from routed_experts.kernels.gradient_launches import Rows
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches
from routed_experts.kernels.matrices import down_matrix
from routed_experts.weights import ExpertWeights

# What gradients are of, in the order of a step's arguments: x, routing weights, weights.TENSOR_NAMES.
_GATED = ("x", "weights", "up", None, "down", "up_bias", None, "down_bias")
_UNGATED = ("x", "weights", None, "up", "down", None, "up_bias", "down_bias")


class Kept(NamedTuple):
    """What a forward keeps for its backward beside the inputs: the first product (S, N) and the flat tiles."""

    u: Tensor | None = None
    tiles: Tensor | None = None


class Step(NamedTuple):
    """A forward, (experts, x, ids, weights, keep), and its backward, (call, x, weights, u)."""

    forward: Callable[[ExpertWeights, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Kept]]
    backward: Callable[[Backward, Tensor, Tensor | None, Tensor | None], Grads]


def forward(
    name: str, experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor | None, keep: bool
) -> tuple[Tensor, Kept]:
    """Run a step; return its result and what its backward wants to see again.

    Args:
        name: of STEPS.
        experts: the weights.
        x: what the step gets: tokens (T, H); gated units (S, I), sorted; or rows (S, H) in pair order.
        ids: (T, K) expert ids.
        weights: (T, K) routing weights, where the step takes them.
        keep: whether to keep the first product; else it is computed again.
    """
    return STEPS[name].forward(experts, *settle(x, ids, weights), keep)


def backward(
    name: str,
    experts: ExpertWeights,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    kept: Kept,
    grad: Tensor,
    needs: Sequence[bool],
    mains: dict[int, Tensor] | None = None,
) -> list[Tensor | None]:
    """Gradients of a step's x, weights and tensors, each in its tensor's dtype; those of matrices in its strides.

    Args:
        name, experts, x, ids, weights: as in :func:`forward`.
        kept: what forward left.
        grad: of its result.
        needs: which of the eight gradients are wanted.
        mains: float32 main gradients by position among the eight: these are added to, and no gradient is given.
    """
    roles = _GATED if experts.has_gate else _UNGATED
    wanted = {role for role, need in zip(roles, needs, strict=True) if role and need}
    found_mains = {str(roles[place]): main for place, main in (mains or {}).items()}
    x, ids, weights = settle(x, ids, weights)
    call = Backward(experts, x, ids, grad, wanted, found_mains, kept.tiles)
    found = STEPS[name].backward(call, x, weights, kept.u)
    return [found.get(role) if role else None for role in roles]


def _whole(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor | None, keep: bool) -> tuple[Tensor, Kept]:
    assert weights is not None
    sizes = sizes_of(experts, ids)
    choice = choose(experts, sizes, x.dtype, limits(x.device), is_sorted=True)
    tiles, chunks = steps.tile_lists(sizes, choice.up.rows, x.device)

    def empty(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=x.dtype, device=x.device)

    out, a, slots = empty(*x.shape), empty(sizes.pairs, sizes.inner), empty(sizes.pairs, sizes.hidden)
    u = empty(sizes.pairs, sizes.inner * (1 + experts.has_gate)) if keep else None

    def attempt(smaller: Choice) -> Iterable[Launch]:
        yield from launches(ids, tiles, chunks, sizes.experts, smaller.up.rows, tiles=True)
        yield mlp.up(experts, smaller, x, ids, tiles, a, raw=u)
        yield mlp.down_by_tile(experts, smaller, a, ids, tiles, slots)
        yield mlp.weigh(slots, ids, weights, out, sizes.experts)

    run_smaller(smaller_choices(choice), out, attempt)
    return out, Kept(u, tiles)


def _whole_backward(call: Backward, x: Tensor, weights: Tensor | None, u: Tensor | None) -> Grads:
    assert weights is not None
    experts, sizes, wanted = call.experts, call.sizes, call.wanted
    found: Grads = {}
    u_grad = scaled = None
    if wanted - {"down_bias"}:
        u = call.product(x) if u is None else u
        u_grad = torch.empty_like(u) if wanted & {"x", "up", "up_bias"} else None
        scaled = call.empty(sizes.pairs, sizes.inner) if "down" in wanted else None
        if "weights" in wanted:
            found["weights"] = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
        call.units(u, weights, u_grad, scaled, found.get("weights"))
    tokens = Rows(call.grad, sizes.slots)
    if scaled is not None:
        found |= call.weight("down", experts.down_weight, tokens, Rows(scaled, 0))
    found |= call.bias("down_bias", experts.down_proj_bias, tokens, weights)
    del scaled
    return found if u_grad is None else found | call.first(x, u_grad)


def _up(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor | None, keep: bool) -> tuple[Tensor, Kept]:
    return steps.up_rows(experts, x, ids), Kept()


def _up_backward(call: Backward, x: Tensor, weights: Tensor | None, u: Tensor | None) -> Grads:
    return call.first(x, call.grad)


def _down(experts: ExpertWeights, a: Tensor, ids: Tensor, weights: Tensor | None, keep: bool) -> tuple[Tensor, Kept]:
    return steps.down_rows(experts, a, ids), Kept()


def _down_backward(call: Backward, a: Tensor, weights: Tensor | None, u: Tensor | None) -> Grads:
    experts, sizes, slots = call.experts, call.sizes, Rows(call.grad, 1)
    found = call.weight("down", experts.down_weight, slots, Rows(a, 0))
    found |= call.bias("down_bias", experts.down_proj_bias, slots)
    if "x" in call.wanted:
        # Rows of sentinels read 0 in the gradient too: a gate's own code goes over them.
        found["x"] = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        out = found["x"]

        def product(choice: Choice) -> list[Launch]:
            matrix = call.matrix(down_matrix, choice)
            return [gradient_launches.gathered(choice, sizes, slots, matrix, call.tiles, out)]

        call.run(out, product)
    return found


def _weigh(
    experts: ExpertWeights, slots: Tensor, ids: Tensor, weights: Tensor | None, keep: bool
) -> tuple[Tensor, Kept]:
    assert weights is not None
    return steps.weigh_rows(experts, slots, ids, weights), Kept()


def _weigh_backward(call: Backward, slots: Tensor, weights: Tensor | None, u: Tensor | None) -> Grads:
    assert weights is not None
    slots = slots.contiguous()
    given = {"x": slots, "weights": weights}
    found = {
        role: torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for role, like in given.items()
        if role in call.wanted
    }
    made = (found.get("x"), found.get("weights"))
    if found:
        launch = gradient_launches.weigh(call.sizes, call.grad, slots, call.ids, weights, made)
        run_smaller([None], call.grad, lambda _: [launch])
    return found


STEPS = {
    "whole": Step(_whole, _whole_backward),
    "up": Step(_up, _up_backward),
    "down": Step(_down, _down_backward),
    "weigh": Step(_weigh, _weigh_backward),
}
