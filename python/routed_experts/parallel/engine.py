"""One dispatch over one group, whatever computes a rank's rows: agree, then run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from routed_experts.errors import LayoutError
from routed_experts.parallel.all_reduce import Compute, run_all_reduce
from routed_experts.parallel.all_to_all import Batch, fewer_chunks, run_all_to_all
from routed_experts.parallel.header import (
    DISPATCHES,
    MOST_CHUNKS,
    Agreement,
    Header,
    agree,
    announce_fault,
    digest_of,
    dtype_code,
)
from routed_experts.parallel.link import Link
from routed_experts.parallel.plan import Counts, count_rows
from routed_experts.parallel.untraced import untraced

_CHUNKS_ON_CUDA = 4
_LEAST_TOKENS = 1024  # of a run, on the rank that has most: fewer do not hide what a further exchange costs


class Engine:
    """The calls of one layer over a process group; ``compute`` is handed rows, local ids and weights."""

    def __init__(self, process_group: Any, dispatch: str, timeout: float | timedelta, chunks: int | None) -> None:
        if chunks is not None and not (isinstance(chunks, int) and 1 <= chunks <= MOST_CHUNKS):
            raise LayoutError(
                "chunks is no number of runs",
                found=repr(chunks),
                needed=f"a whole number from 1 to {MOST_CHUNKS}, or None",
                hint="the same on every rank",
            )
        self.link = Link(process_group, timeout)
        self.dispatch = dispatch
        self._chunks = chunks
        self._calls = 0

    @untraced
    def run(self, compute: Compute, share: int, batch: Batch, *, trains: bool, checked: bool = False) -> Tensor:
        """Run one call over ``share`` experts a rank, (T, H); ``trains`` says whether they want gradients."""
        self.link.check()
        if self.dispatch == "all_reduce":
            # On CUDA the host would wait for the device at every layer; there only checked mode compares calls.
            if batch.x_TH.is_cpu or checked:
                self._agree(batch, share, 1, trains)
            return run_all_reduce(self.link, compute, share, *batch)
        chunks = self._most_chunks(batch.x_TH.device)
        agreement = self._agree(batch, share, chunks, trains)
        if self._chunks is None:
            agreement, chunks = fewer_chunks(agreement, chunks, _LEAST_TOKENS)
        return run_all_to_all(self.link, compute, share, batch, agreement, chunks)

    def announce_fault(self, device: torch.device, checked: bool) -> None:
        """Let the other ranks know that this one raises, where they are about to ask."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing can be asked while a graph is captured, on any rank
        if self.dispatch == "all_to_all" or device.type == "cpu" or (checked and self.dispatch == "all_reduce"):
            self._calls += 1
            announce_fault(self.link, device)

    def _most_chunks(self, device: torch.device) -> int:
        return self._chunks or (_CHUNKS_ON_CUDA if device.type == "cuda" else 1)

    def _agree(self, batch: Batch, share: int, chunks: int, trains: bool) -> Agreement:
        x, index, weights = batch
        world = self.link.world
        if self.dispatch == "all_to_all":
            counts = count_rows(index, share * world, world, chunks)
        else:
            nothing = torch.zeros(chunks, world, dtype=torch.int64, device=x.device)
            counts = Counts(nothing, nothing.new_zeros(()))
        header = Header(
            call=self._calls,
            dispatch=DISPATCHES.index(self.dispatch),
            experts=share * world,
            hidden=x.shape[1],
            slots=index.shape[1],
            dtype=dtype_code(x.dtype),
            weights_dtype=dtype_code(weights.dtype),
            chunks=chunks,
            grad_mode=torch.is_grad_enabled(),
            wants_grad=torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad),
            trains=torch.is_grad_enabled() and trains,
            tokens=x.shape[0],
            digest=digest_of(index) if self.dispatch == "all_reduce" else 0,
        )
        self._calls += 1
        return agree(self.link, header, *counts)
