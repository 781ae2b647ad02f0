"""Stands in for the library's helper of the same name: ranks as spawned gloo processes on one machine.

Copied beside its tests. ``PEER_SUITE_OURS=1`` puts ours behind the built-in names in every rank, which load no
pytest plugin.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``run_distributed(n)(function)(*args)`` calls ``function(rank, *args)`` in n processes of one group."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            _start_rank_processes(_in_group, (world_size, _free_port(), function, args), world_size)

        return call

    return decorate


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    mp.spawn(_rank, args=(function, args, nprocs), nprocs=nprocs)


def _rank(rank: int, function: Callable[..., None], args: tuple[Any, ...], world_size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    if os.environ.get("PEER_SUITE_OURS") == "1":
        from ours_as_backends import install

        print(install(), flush=True)
    function(rank, *args)


def _in_group(rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """A CPU needs no choice."""
