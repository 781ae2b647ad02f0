"""Ranks as processes of one machine, for tests: a gloo group that meets at a file, and what each rank returned.

A server that has imported everything forks the ranks, so that a start costs no import.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What cannot be imported is passed over.
_PRELOADED = [
    "torch.distributed.tensor",
    "routed_experts",
    "transformers.distributed.expert_parallel",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def run_ranks(
    function: Callable[..., Any], world: int, folder: Path, *arguments: Any, wait: float = 120, on: str = "gloo"
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``world`` ranks; return what each gave: a value or a text of its error.

    A rank that ends without either (killed) gives None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(rank, world, str(folder), function, arguments, sys.path, on))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + wait
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0.1))
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    assert not hanging, f"ranks {hanging} hang"
    return [_result(folder / f"rank{rank}.pickle") for rank in range(world)]


def all_good(results: list[Any]) -> list[Any]:
    """Return results of ranks that must not have failed."""
    wrong = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, RankFailure | None)]
    assert not wrong, "\n".join(wrong)
    return results


class RankFailure(str):
    """The traceback of a rank."""


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _rank(
    rank: int,
    world: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    path: list[str],
    on: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    timeout = datetime.timedelta(seconds=60)
    if on == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(on, init_method=meeting, rank=rank, world_size=world, timeout=timeout)
    try:
        result = function(rank, *arguments)
    except Exception:
        result = RankFailure(traceback.format_exc())
    partial = Path(folder) / f"rank{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder) / f"rank{rank}.pickle")
    # Groups that a test has broken may not be destroyed in order.
    os._exit(0)
