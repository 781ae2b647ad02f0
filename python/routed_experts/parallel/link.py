"""One rank's end of a process group: every wait ends within a stated time, in an error that says which rank is missing.

On a CPU (gloo) each operation carries the timeout itself. On CUDA (NCCL) the exchange of headers is waited for with it,
which is also the one place where the host waits for the device; what follows is queued on streams, and there the
group's own watchdog counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from routed_experts.errors import LayoutError
from routed_experts.parallel.errors import RankError

# An operation that does not end by its own timeout is given up a little later.
_GRACE = timedelta(seconds=2)


class Link:
    """A process group as one rank sees it. After a failure every further call raises at once."""

    def __init__(self, process_group: Any, timeout: float | timedelta) -> None:
        """Take a ProcessGroup, a mesh of one dimension, or None for the default group; ``timeout`` in seconds."""
        self.group = _group(process_group)
        self.rank: int = dist.get_rank(self.group)
        self.world: int = dist.get_world_size(self.group)
        self.timeout = _duration(timeout)
        self.failure: str | None = None

    def check(self) -> None:
        """Raise if an earlier call failed: what its ranks have sent would be taken for the answer to this one."""
        if self.failure is not None:
            raise RankError(
                "an earlier call on this group failed",
                found=self.failure,
                needed="a group on which every call has ended well",
                hint="end the job, or make a new process group and a new ExpertParallel",
            )

    def exchange_headers(self, mine_WL: Tensor) -> Tensor:
        """Give row w to rank w and return what every rank gave to this one, (W, L) int64."""
        theirs_WL = torch.empty_like(mine_WL)
        if mine_WL.is_cpu:
            self._exchange_by_rank(mine_WL, theirs_WL)
        else:
            work = self.start(theirs_WL, mine_WL, [1] * self.world, [1] * self.world)
            # With a timeout the host waits until the ranks have answered.
            self._guard("the exchange of headers", lambda: work.wait(self.timeout))
        return theirs_WL

    def start(self, out: Tensor, rows: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Any:
        """Begin an exchange of rows along the first axis; both tensors must live until ``finish``."""
        options = dist.AllToAllOptions()
        options.timeout = self.timeout
        options.asyncOp = True
        return self._guard(
            "an exchange of rows",
            lambda: self.group.alltoall_base(out, rows, list(out_splits), list(in_splits), options),
        )

    def finish(self, work: Any, on_host: bool) -> None:
        """Wait for a work on the host (CPU tensors), or let the current stream wait for it."""
        self._guard("an exchange of rows", lambda: self._wait(work, on_host))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks in place: the same bits on every rank."""
        if tensor.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
            options.timeout = self.timeout
            options.asyncOp = tensor.is_cpu
            work = self._guard("a sum over the ranks", lambda: self.group.allreduce([tensor], options))
            self._guard("a sum over the ranks", lambda: self._wait(work, tensor.is_cpu))
        return tensor

    def _wait(self, work: Any, on_host: bool) -> None:
        if on_host:
            work.wait(self.timeout + _GRACE)
        elif work is not None:  # torch may give none for what ran on the current stream
            work.wait()

    def _exchange_by_rank(self, mine_WL: Tensor, theirs_WL: Tensor) -> None:
        """Rank by rank, so that a missing one can be named."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        theirs_WL[self.rank] = mine_WL[self.rank]
        deadline = time.monotonic() + self.timeout.total_seconds()

        def begin() -> dict[int, tuple[Any, Any]]:
            arriving = {r: dist.irecv(theirs_WL[r], group=self.group, group_src=r) for r in others}
            return {r: (arriving[r], dist.isend(mine_WL[r], group=self.group, group_dst=r)) for r in others}

        works = self._guard("the exchange of headers", begin)
        missing = {rank: text for rank in others if (text := _outcome(works[rank], deadline))}
        if missing:
            self._fail(
                "a rank did not answer",
                ", ".join(f"rank {rank}: {text}" for rank, text in missing.items()),
            )

    def _guard(self, what: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except (RuntimeError, ValueError) as error:
            self._fail(f"{what} with the other ranks failed", _first_line(error), error)

    def _fail(self, message: str, found: str, cause: BaseException | None = None) -> None:
        self.failure = f"{message}; {found}"
        raise RankError(
            f"{message} (this is rank {self.rank} of {self.world})",
            found=found,
            needed=f"every rank in the same call within {self.timeout.total_seconds():g} s",
            hint="look for the first error of the other ranks; a first call that compiles needs a larger timeout=",
        ) from cause


def _outcome(works: tuple[Any, Any], deadline: float) -> str | None:
    """Wait for both directions; return what went wrong, or None."""
    try:
        for work in works:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
        return "no answer in time" if "timed out" in text.lower() else text
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _group(process_group: Any) -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise RankError(
            "torch.distributed has no process group",
            found="not initialised",
            needed="torch.distributed.init_process_group in every rank",
            hint="start the program with torchrun, or pass a file:// or tcp:// init_method",
        )
    if process_group is None:
        return dist.group.WORLD
    group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(
            "the ranks are given by a process group",
            found=f"{type(process_group).__name__}; a rank outside a group gets a mark and no group",
            needed="a torch.distributed.ProcessGroup that this rank is in, a 1-D DeviceMesh, or None for all ranks",
            hint="torch.distributed.new_group(ranks) makes one; every rank calls it",
        )
    return group


def _duration(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not 0 < seconds < 10**8:
        raise LayoutError(
            "timeout is no length of time",
            found=repr(timeout),
            needed="seconds, more than 0, or a timedelta",
            hint="every rank waits that long for the others before it raises",
        )
    return timedelta(seconds=seconds)
