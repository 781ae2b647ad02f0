"""Which experts a rank runs: its part of full weights, live where they are a module's, or the share it was given."""

from __future__ import annotations

from typing import Any

from torch import nn

from routed_experts.errors import LayoutError
from routed_experts.sharding import local_experts, share_tensors
from routed_experts.weights import ExpertWeights

# What in a module's weights is the module's own code, and is read anew with its tensors.
_FUNCTIONS = ("activation", "act_fn", "gate", "post_expert_norm")


class Shares:
    """This rank's experts. ``total`` counts those of all ranks."""

    def __init__(self, experts: ExpertWeights | nn.Module, rank: int, world: int) -> None:
        weights = experts if isinstance(experts, ExpertWeights) else ExpertWeights.from_module(experts)
        self._rank, self._world = rank, world
        self._live: ExpertWeights | None = None
        self._form: Any = None
        if weights.shard:
            self._share = _check_share(weights, rank, world)
        else:
            self._share = weights.shard(rank, world)
            self._live = weights if weights.__dict__.get("_module") is not None else None
        self.total = self._share.num_experts * world

    def bind(self) -> ExpertWeights:
        """Return this rank's experts for one call; a module's tensors are cut anew, for it may have replaced them."""
        if self._live is None:
            return self._share
        bound = self._live.bind()
        form = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in bound.tensors()]
        if form != self._form:
            self._share, self._form = self._live.shard(self._rank, self._world), form
            return self._share
        tensors = share_tensors(bound, local_experts(bound.num_experts, self._rank, self._world))
        return self._share.with_tensors(tensors, **{name: getattr(bound, name) for name in _FUNCTIONS})


def _check_share(weights: ExpertWeights, rank: int, world: int) -> ExpertWeights:
    if tuple(weights.shard) != (rank, world):
        raise LayoutError(
            "the experts are the share of another rank",
            found="the share of rank {} of {}".format(*weights.shard),
            needed=f"that of rank {rank} of {world}, as this rank is in the group, or the experts of all ranks",
            hint="weights.shard(dist.get_rank(group), dist.get_world_size(group))",
        )
    return weights
