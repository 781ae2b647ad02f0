"""ExpertParallel: the experts of one layer, spread over the ranks of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from routed_experts import selection
from routed_experts.checks import check_call, check_ids, compute_dtype, is_checked
from routed_experts.combine import wants_grad
from routed_experts.errors import DeviceError, LayoutError
from routed_experts.moe import run_experts
from routed_experts.parallel.all_to_all import Batch
from routed_experts.parallel.engine import Engine
from routed_experts.parallel.header import DISPATCHES
from routed_experts.parallel.load import LoadReport, logger, measure_load
from routed_experts.parallel.shares import Shares
from routed_experts.parallel.untraced import untraced
from routed_experts.weights import ExpertWeights

TIMEOUT = 300.0  # seconds; a first call may compile kernels on some rank


class ExpertParallel:
    """Experts spread over ranks: called like the experts of one, with ids that count the experts of all ranks.

    Every rank makes every call, in the same order, a rank without tokens too. Values and gradients (of inputs,
    routing weights and this rank's experts) equal those of one rank that holds everything, to rounding, and are the
    same bits on every run.
    """

    def __init__(
        self,
        experts: ExpertWeights | nn.Module,
        process_group: Any,
        dispatch: str = "all_reduce",
        *,
        backend: str = "auto",
        timeout: float | timedelta = TIMEOUT,
        chunks: int | None = None,
        checked: bool | None = None,
        report_load: bool = False,
    ) -> None:
        """Nothing is sent here; ranks that differ find out at the first call.

        Args:
            experts: all of them (ExpertWeights, or a module read live), of which this rank runs its share without a
                copy; or this rank's share, as ``weights.shard(rank, world)`` and a sharded ``from_checkpoint`` give.
            process_group: a ProcessGroup, a 1-D DeviceMesh, or None for all ranks; gloo for CPU, NCCL for CUDA.
            dispatch: ``all_reduce``: every rank holds the same batch, outputs are summed. ``all_to_all``: every rank
                has tokens of its own, any number, and rows travel. ``megamoe``: one kernel exchanges and computes.
            backend: what runs a rank's rows, ``auto`` or a name; ``megamoe`` brings its own.
            timeout: seconds (or a timedelta) that a rank waits for the others before it raises RankError.
            chunks: runs of tokens that all_to_all sends one after the other while it computes; by default 4 on CUDA
                from 4096 tokens on any rank on, else 1. The same on every rank.
            checked: ids outside 0..E-1 raise ExpertIndexError on their rank and RankError on the others, and
                all_reduce on CUDA compares what ranks call before it runs (the host then waits for the device);
                None reads ROUTED_EXPERTS_CHECKED.
            report_load: count pairs for each expert and rank in every call, into ``last_load`` and the logger.

        Raises:
            LayoutError: E is no multiple of the number of ranks (the error has both), a share of another rank or
                world, an unknown dispatch, or settings that are none.
            RankError: there is no process group.
        """
        self.dispatch = _check_dispatch(dispatch, backend)
        self.backend = "deepgemm_megamoe" if dispatch == "megamoe" else selection.backend_name(backend)
        self.checked = checked
        self.report_load = report_load
        self.last_load: LoadReport | None = None
        self.engine = Engine(process_group, dispatch, timeout, chunks)
        self._shares = Shares(experts, self.engine.link.rank, self.engine.link.world)
        self.num_experts = self._shares.total

    @untraced
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run this rank's tokens through the experts of all ranks: (T, H) in the dtype of hidden_states.

        Args:
            hidden_states: (T, H); T may differ between ranks, and be 0, except with ``all_reduce``.
            top_k_index: (T, K) ids of the experts of all ranks, any integer dtype; others contribute exactly 0.
            top_k_weights: (T, K) routing weights, any floating dtype.

        Raises:
            RankError: a rank that does not answer within the timeout, is gone, or refuses its own arguments.
            LayoutError: ranks that do not make the same call; and what ``run_experts`` raises, on every rank.
        """
        share = self._shares.bind()
        link = self.engine.link
        link.check()
        try:
            self._check(share, hidden_states, top_k_index, top_k_weights)
        except Exception:
            self.engine.announce_fault(share.device, is_checked(self.checked))
            raise
        out = self._run(share, Batch(hidden_states, top_k_index, top_k_weights))
        if self.report_load:
            self.last_load = self.load(top_k_index)
            logger.info("%s over %d ranks: %s", self.dispatch, link.world, self.last_load)
        return out

    def load(self, top_k_index: Tensor) -> LoadReport:
        """Return how a routing loads experts and ranks; every rank calls it (with ``all_reduce`` nothing is sent)."""
        return measure_load(self.engine.link, top_k_index, self.num_experts, self.dispatch == "all_reduce")

    def _run(self, share: ExpertWeights, batch: Batch) -> Tensor:
        if self.dispatch == "megamoe":  # global ids and the group go to the backend, which does the rest
            group = self.engine.link.group
            return run_experts(*batch, share, backend=self.backend, process_group=group, expert_parallel=True)

        def compute(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return run_experts(rows, ids, weights, share, backend=self.backend, expert_parallel=True)

        trains, checked = wants_grad(*share.tensors()), is_checked(self.checked)
        return self.engine.run(compute, share.num_experts, batch, trains=trains, checked=checked)

    def _check(self, share: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
        """Refuse, before anything is sent, what this rank can know will not run."""
        check_call(x_TH, index_TK, weights_TK, share)
        dtype = compute_dtype(x_TH, share, False)
        if is_checked(self.checked):
            check_ids(index_TK, self.num_experts)
        if x_TH.is_cuda and self.dispatch == "all_to_all" and torch.cuda.is_current_stream_capturing():
            _refuse_capture()
        if self.backend != "auto":
            # A backend that cannot run here is refused before the other ranks wait for its rows.
            selection.choose(
                share,
                num_tokens=max(x_TH.shape[0], 1),
                num_top_k=max(index_TK.shape[1], 1),
                dtype=dtype,
                backend=self.backend,
                training=wants_grad(x_TH, weights_TK, *share.tensors()),
                expert_parallel=True,
                process_group=self.dispatch == "megamoe",
            )


def _check_dispatch(dispatch: str, backend: str) -> str:
    if dispatch not in DISPATCHES:
        raise LayoutError(
            "unknown dispatch",
            found=repr(dispatch),
            needed=" or ".join(map(repr, DISPATCHES)),
            hint="all_reduce where ranks share a batch, all_to_all where each has its own",
        )
    if dispatch == "megamoe" and selection.backend_name(backend) not in ("auto", "deepgemm_megamoe"):
        raise LayoutError(
            "megamoe computes by itself",
            found=f"backend={backend!r}",
            needed="backend='auto'",
            hint="choose dispatch='all_to_all' to have another backend compute",
        )
    return dispatch


def _refuse_capture() -> NoReturn:
    raise DeviceError(
        "all_to_all cannot be captured in a CUDA graph",
        found="a stream that is being captured",
        needed="an ordinary stream: the host reads how many rows each rank sends",
        hint="use dispatch='all_reduce', which reads nothing",
    )
