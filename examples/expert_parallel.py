"""Spread the experts of one layer over ranks, and see that they compute what one rank computes.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    torchrun --nproc-per-node 4 examples/expert_parallel.py --tokens 64 --dispatch all_to_all

Every rank makes the same experts from one seed, keeps its share, and has tokens of its own (rank r has r more than
rank 0). What happens, in order:

1. ``weights.shard(rank, world)`` gives views of this rank's experts; a real program reads them with
   ``ExpertWeights.from_checkpoint(path, rank=rank, world=world)``, which opens nothing else.
2. ``rx.parallel.ExpertParallel`` runs forward and backward, once for each way of dispatch.
3. Every rank compares output and gradients with all experts in its own memory; rank 0 prints a table.

The exit status is 1 on every rank if any differs by more than rounding. On CPUs the group is gloo; with ``--device
cuda`` it is NCCL, a device for each rank.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import routed_experts as rx

TOP_K = 2
TOLERANCE = 1e-5


def make_experts(options: argparse.Namespace, device: torch.device) -> rx.ExpertWeights:
    """Return the experts of all ranks, the same on each."""
    g = torch.Generator().manual_seed(0)
    hidden, inner = options.hidden, options.hidden // 2
    up = torch.randn(options.experts, 2 * inner, hidden, generator=g) * hidden**-0.5
    down = torch.randn(options.experts, hidden, inner, generator=g) * inner**-0.5
    return rx.ExpertWeights(gate_up_proj=up.to(device), down_proj=down.to(device))


def make_tokens(rank: int, options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (T, H), expert ids (T, K) and routing weights (T, K) of one rank."""
    g = torch.Generator().manual_seed(1 + rank)
    tokens = options.tokens + rank
    scores, index = torch.randn(tokens, options.experts, generator=g).softmax(-1).topk(TOP_K)
    x = torch.randn(tokens, options.hidden, generator=g)
    return x.to(device), index.to(device), scores.to(device)


def forward_backward(layer: object, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return output and gradients of tokens and routing weights, for a loss that is a sum of squares."""
    x, index, weights = batch[0].clone().requires_grad_(), batch[1], batch[2].clone().requires_grad_()
    out = layer(x, index, weights)  # type: ignore[operator]
    return out, *torch.autograd.grad(out.square().sum(), (x, weights))


def largest_error(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    """Return the largest difference over the largest value, over all ranks."""
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, right, strict=True)]
    worst = torch.stack(errors).max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def main() -> int:
    """Compare every way of dispatch with one rank; 0 if all agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of rank 0")
    parser.add_argument("--dispatch", choices=["all_reduce", "all_to_all"], action="append")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for another rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.device == "cuda":
        torch.cuda.set_device(device)
    experts = make_experts(options, device)
    share = experts.shard(rank, world)
    table = Table("dispatch", "experts a rank", "tokens of this rank", "imbalance", "error")
    good = True
    for dispatch in options.dispatch or ["all_reduce", "all_to_all"]:
        layer = rx.parallel.ExpertParallel(
            share, dist.group.WORLD, dispatch, backend=options.backend, timeout=options.timeout, report_load=True
        )
        batch = make_tokens(0 if dispatch == "all_reduce" else rank, options, device)
        found = forward_backward(layer, batch)
        right = forward_backward(lambda x, index, weights: rx.run_experts(x, index, weights, experts), batch)
        error = largest_error(found, right)
        good &= error <= TOLERANCE
        assert layer.last_load is not None  # asked for above
        cells = (str(share.num_experts), str(len(batch[0])), f"{layer.last_load.imbalance:.2f}")
        table.add_row(dispatch, *cells, f"{error:.1e}" + ("" if good else f" > {TOLERANCE:.0e}"))
    if rank == 0:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(f"{options.experts} experts over {world} ranks, {share}", table)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
