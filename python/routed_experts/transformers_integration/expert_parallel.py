"""Our exchange in transformers' registry of expert-parallel implementations, where the release has one.

    DistributedConfig(tp_size=2, ep_size=2, ep_implementation="routed_experts")

It brings tokens to experts and back; what computes a rank's rows is the model's own choice of experts function, ours
or the library's. Releases without the registry hook routers and experts themselves, and ours run under those hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from routed_experts.names import PREFIX, to_config
from routed_experts.parallel.all_to_all import Batch
from routed_experts.parallel.engine import Engine
from routed_experts.parallel.expert_parallel import TIMEOUT
from routed_experts.parallel.replicas import gather_parts, take_part
from routed_experts.parallel.untraced import untraced
from routed_experts.transformers_integration.adapter import Plan

_MEGAMOE = to_config("deepgemm_megamoe")
_ABSENT: Any = object()


class ExpertParallelAdapter:
    """The name ``routed_experts`` among transformers' ``ep_implementation`` names."""

    name = "expert parallelism"

    def __init__(self) -> None:
        self.registry: Any = None
        self.before: Any = _ABSENT

    def install(self, plan: Plan) -> None:
        """Register, once; releases without the registry are left as they are."""
        try:
            from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
        except ImportError:
            return
        if self.registry is None:
            implementation = type("RoutedExpertsEP", (_Exchange, EPImplementation), {"__doc__": _Exchange.__doc__})
            self.registry = EPImplementationInterface
            self.before = EPImplementationInterface._global_mapping.get(PREFIX, _ABSENT)
            EPImplementationInterface.register(PREFIX, implementation)

    def uninstall(self) -> None:
        """Put back what the name held before."""
        if self.registry is None:
            return
        mapping, self.registry = self.registry._global_mapping, None
        if not issubclass(mapping.get(PREFIX, object), _Exchange):
            return  # somebody else's later entry is theirs
        if self.before is _ABSENT:
            del mapping[PREFIX]
        else:
            mapping[PREFIX] = self.before


class _Exchange:
    """One experts module's tokens: summed over ranks that share a batch, exchanged between ranks that do not.

    Ranks of a tensor-parallel group hold the same batch. If the expert group is that group, every rank runs the whole
    batch and outputs are summed; else each keeps its part of the batch, exchanges its rows with the expert group, and
    the parts are gathered again.
    """

    experts_forward: Any
    num_local_experts: int
    ep_mesh: Any
    tp_mesh: Any
    shares_batch: bool

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)  # type: ignore[call-arg]
        # The module, which holds this object in its forward, would otherwise count as held by it.
        object.__setattr__(self, "_experts", experts)
        dispatch = "all_reduce" if self.shares_batch else "all_to_all"
        self._engine = Engine(ep_mesh, dispatch, TIMEOUT, None)
        self._replicas = None if self.shares_batch or tp_mesh.size() == 1 else Engine(tp_mesh, dispatch, TIMEOUT, None)

    @untraced
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted output of this rank's tokens, (T, H); ids count the experts of all ranks."""
        batch = Batch(hidden_states, top_k_index, top_k_weights)
        if self._is_megamoe():
            return self._megamoe(batch)
        if self._replicas is None:
            return self._run(batch)
        link = self._replicas.link
        part = Batch(take_part(link, hidden_states), take_part(link, top_k_index), take_part(link, top_k_weights))
        return gather_parts(link, self._run(part), hidden_states.shape[0])

    def _run(self, batch: Batch) -> Tensor:
        trains = any(parameter.requires_grad for parameter in self._experts.parameters(recurse=False))  # type: ignore[attr-defined]
        return self._engine.run(self._compute, self.num_local_experts, batch, trains=trains)

    def _compute(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if rows.shape[0]:
            return self.experts_forward(rows, ids, weights)
        # Functions of others may not take no rows; one that nobody reads keeps the graph connected.
        dummy = rows.sum(dim=0, keepdim=True)
        nobody = ids.new_full((1, ids.shape[1]), self.num_local_experts)
        return self.experts_forward(dummy, nobody, weights.new_zeros(1, ids.shape[1]))[:0]

    def _is_megamoe(self) -> bool:
        config = getattr(self._experts, "config", None)  # type: ignore[attr-defined]
        return getattr(config, "_experts_implementation", None) == _MEGAMOE

    def _megamoe(self, batch: Batch) -> Tensor:
        """Hand global ids and the group to the kernel, which takes each rank's rows for tokens of that rank alone."""
        group = self.ep_mesh.get_group()
        sharing = self.ep_mesh if self.shares_batch else self.tp_mesh
        if sharing.size() == 1:
            return self.experts_forward(*batch, process_group=group)
        link = self._engine.link if self.shares_batch else self._replicas.link  # type: ignore[union-attr]
        out = self.experts_forward(*(take_part(link, tensor) for tensor in batch), process_group=group)
        return gather_parts(link, out, torch.Size(batch.x_TH.shape)[0])
