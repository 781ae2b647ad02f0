"""``ExpertWeights.shard``: whose share the weights are, and the way to one.

Ranks own contiguous shares: rank r of n holds experts r*E/n .. (r+1)*E/n - 1. Experts are never cut, so no width, no
quantization block and no scale is: what every rank holds is whole matrices with their whole grids of scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from routed_experts.errors import LayoutError

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights


class Share(tuple[int, int]):
    """(rank, world) of weights that are one rank's share; calling it refuses, for a share is not shared again."""

    __slots__ = ()

    def __call__(self, rank: int, world: int) -> NoReturn:
        """Refuse: the experts of the other ranks are not here."""
        raise LayoutError(
            "these experts are one rank's share already",
            found=f"the share of rank {self[0]} of {self[1]}",
            needed="the experts of all ranks",
            hint=f"shard the full weights: weights.shard({rank}, {world})",
        )


class Full:
    """The ``shard`` of weights of all ranks: equal to None, false, and called with (rank, world) it makes a share."""

    __slots__ = ("_weights",)

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights

    def __call__(self, rank: int, world: int) -> ExpertWeights:
        """Return the share of ``rank`` of ``world`` ranks: E/world experts, views of these tensors, no copy.

        Gradients of a share arrive in the tensors that these weights hold.

        Raises:
            LayoutError: E is no multiple of ``world``, or there is no such rank.
        """
        return take_share(self._weights, rank, world)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Full)

    def __hash__(self) -> int:
        return hash(None)

    def __repr__(self) -> str:
        return "None"


class ShardOf:
    """Descriptor of ``ExpertWeights.shard``; a share's own ``__dict__`` entry comes before it."""

    def __get__(self, weights: ExpertWeights | None, owner: type) -> Any:
        """Return what stands for full weights."""
        return self if weights is None else Full(weights)


def local_experts(count: int, rank: int, world: int) -> range:
    """Return the experts that ``rank`` of ``world`` owns among ``count``.

    Raises:
        LayoutError: ``count`` is no multiple of ``world``, or there is no such rank.
    """
    if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world):
        raise LayoutError(
            "rank and world do not name a share of the experts",
            found=f"rank={rank!r}, world={world!r}",
            needed="whole numbers with 0 <= rank < world",
            hint="torch.distributed.get_rank(group) and get_world_size(group)",
        )
    if count % world:
        raise LayoutError(
            f"{count} experts cannot be shared equally by {world} ranks",
            found=f"{count} experts, {world} ranks",
            needed="a number of experts that is a multiple of the number of ranks",
            hint="ranks that would divide them: " + ", ".join(str(n) for n in range(1, count + 1) if count % n == 0),
        )
    share = count // world
    return range(rank * share, (rank + 1) * share)


def take_share(weights: ExpertWeights, rank: int, world: int) -> ExpertWeights:
    """Do what :meth:`Full.__call__` says; every shape is checked again, scales by their grids."""
    bound = weights.bind()
    tensors = share_tensors(bound, local_experts(bound.num_experts, rank, world))
    share: ExpertWeights = object.__new__(type(bound))
    share._set(
        tensors,
        activation=bound.activation,
        gate=bound.gate,
        swiglu_limit=bound.swiglu_limit,
        swiglu_alpha=bound.swiglu_alpha,
        has_gate=bound.has_gate,
        is_transposed=bound.is_transposed,
        is_concatenated=bound.is_concatenated,
        post_expert_norm=bound.post_expert_norm,
        quantization=bound.quantization,
        num_experts=bound.num_experts // world,
    )
    mark_share(share, rank, world)
    return share


def share_tensors(bound: ExpertWeights, experts: range) -> dict[str, Tensor | None]:
    """Return views of every tensor over a run of experts: all of them count experts on their first axis."""
    return {
        name: None if tensor is None else tensor[experts.start : experts.stop]
        for name, tensor in bound._tensors.items()
    }


def mark_share(weights: ExpertWeights, rank: int, world: int) -> None:
    """Say that ``weights`` are the share of ``rank``."""
    weights.__dict__["shard"] = Share((rank, world))
