"""Experts over ranks beside one device, and beside the floor of compute and transfer, in one run.

    python benches/bench_parallel.py [--ranks 2] [--device cuda] [--shape NAME] [--tokens 1,4096] [--json FILE]

Without a launcher it starts its own ranks. The gate comes first: values are compared with all experts on one rank, and
a wrong answer has no time. Every figure is a median of the slowest rank, in microseconds:

    time        a forward of ExpertParallel, T tokens a rank (all_reduce: W*T, shared by all)
    one device  all experts and the tokens of all ranks on one
    compute     this rank's experts on the rows that they get from all ranks
    transfer    bytes that leave a rank over the rate of an all_to_all of 64 MiB, measured here
    ratio       time over the larger of compute and transfer
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import routed_experts as rx
from routed_experts.parallel.all_reduce import local_ids

SHAPES = {  # E, K, H, I
    "qwen3-30b": (128, 8, 2048, 768),
    "deepseek-v3": (256, 8, 7168, 2048),
    "tiny": (16, 4, 256, 128),
}
TOLERANCE = {"bfloat16": 3e-2, "fp8_block": 3e-2, "float32": 1e-5}
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    x: Tensor
    index: Tensor
    weights: Tensor


def make_experts(shape: tuple[int, ...], fmt: str, device: torch.device) -> rx.ExpertWeights:
    """All experts, the same on every rank; quantized expert by expert."""
    experts, _, hidden, inner = shape
    torch.manual_seed(0)
    dtype = torch.float32 if fmt == "float32" else torch.bfloat16
    up = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(experts, hidden, inner, dtype=dtype, device=device)
    for stack, width in ((up, hidden), (down, inner)):
        for matrix in stack:
            matrix.normal_(std=width**-0.5)
    weights = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    return weights if fmt in ("float32", "bfloat16") else rx.quantize_experts(weights, fmt)


def make_batch(shape: tuple[int, ...], tokens: int, seed: int, like: rx.ExpertWeights) -> Batch:
    experts, top_k, hidden, _ = shape
    g = torch.Generator(like.device).manual_seed(seed)
    scores, index = torch.rand(tokens, experts, generator=g, device=like.device).topk(top_k)
    dtype = like.dtype if like.quantization is None else torch.bfloat16
    return Batch(torch.randn(tokens, hidden, generator=g, device=like.device).to(dtype), index, scores)


def median_us(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median of the slowest rank; all ranks make the same number of calls."""
    times: list[float] = []
    for _ in range(3):
        run()
    start = time.perf_counter()
    run()
    _settle(device)
    count = _slowest((seconds / max(time.perf_counter() - start, 1e-6)), device)
    for _ in range(max(5, min(int(count), 200))):
        dist.barrier()
        _settle(device)
        start = time.perf_counter()
        run()
        _settle(device)
        times.append((time.perf_counter() - start) * 1e6)
    return _slowest(statistics.median(times), device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(value: float, device: torch.device) -> float:
    worst = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def link_rate(device: torch.device, seconds: float) -> float:
    """Bytes a microsecond that leave a rank in a large all_to_all."""
    world = dist.get_world_size()
    rows = torch.zeros(world, (64 << 20) // world, dtype=torch.uint8, device=device)
    out = torch.empty_like(rows)
    micros = median_us(lambda: dist.all_to_all_single(out, rows), device, seconds)
    return rows[0].numel() * (world - 1) / micros


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def measure(
    name: str, fmt: str, tokens: int, dispatch: str, experts: rx.ExpertWeights, rate: float, seconds: float
) -> dict[str, Any]:
    """One row, or its error where the gate does not open."""
    shape, rank, world, device = SHAPES[name], dist.get_rank(), dist.get_world_size(), experts.device
    parts = [make_batch(shape, tokens, 1 + other, experts) for other in range(world)]
    whole = Batch(*(torch.cat(part) for part in zip(*parts, strict=True)))
    mine = parts[rank] if dispatch == "all_to_all" else whole
    share = experts.shard(rank, world)
    layer = rx.parallel.ExpertParallel(share, None, dispatch)
    row: dict[str, Any] = {"shape": name, "fmt": fmt, "T": tokens, "dispatch": dispatch}
    worst = _slowest(error(layer(*mine), rx.run_experts(*mine, experts)), device)
    if not worst <= TOLERANCE[fmt]:
        return {**row, "error": worst, "wrong": True}
    local = local_ids(whole.index, rank, share.num_experts)
    model = rx.parallel.traffic(*shape, world, element_bytes=mine.x.element_size())
    sent = model.all_to_all_bytes * tokens if dispatch == "all_to_all" else model.all_reduce_bytes * len(whole.x)
    times = {
        "time": median_us(lambda: layer(*mine), device, seconds),
        "one device": median_us(lambda: rx.run_experts(*whole, experts), device, seconds),
        "compute": median_us(
            lambda: rx.run_experts(whole.x, local, whole.weights, share, expert_parallel=True), device, seconds
        ),
        "transfer": sent / rate,
    }
    return {**row, "error": worst, **times, "ratio": times["time"] / max(times["compute"], times["transfer"])}


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """What one rank does."""
    is_cuda = options.device == "cuda"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if is_cuda else "cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rate = link_rate(device, options.seconds)
    rows = []
    for name in options.shape:
        for fmt in options.fmt:
            experts = make_experts(SHAPES[name], fmt, device)
            for tokens in map(int, options.tokens.split(",")):
                for dispatch in ("all_reduce", "all_to_all"):
                    rows.append(measure(name, fmt, tokens, dispatch, experts, rate, options.seconds))
            del experts
    if dist.get_rank() == 0:
        print_rows(rows, rate)
        if options.json:
            setting = {"ranks": dist.get_world_size(), "device": str(device), "torch": torch.__version__}
            options.json.write_text(json.dumps({**setting, "bytes_per_us": rate, "rows": rows}, indent=1))
    dist.destroy_process_group()
    return int(any(row.get("wrong", False) for row in rows))


def print_rows(rows: list[dict[str, Any]], rate: float) -> None:
    columns = ("shape", "fmt", "T", "dispatch", "error", "time", "one device", "compute", "transfer", "ratio")
    table = Table(*columns)
    for row in rows:
        cells = [row.get(column, "wrong") for column in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 140).print(f"link: {rate / 1e3:.1f} GB/s a rank, one way", table)


def main() -> int:
    """Start the ranks, or be one."""
    two = torch.cuda.device_count() >= 2
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if two else "cpu")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--fmt", choices=TOLERANCE, action="append")
    parser.add_argument("--tokens", default="1,16,256,4096,16384" if two else "1,64")
    parser.add_argument("--seconds", type=float, default=0.5 if two else 0.1, help="for each figure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.shape = options.shape or (["qwen3-30b", "deepseek-v3"] if two else ["tiny"])
    options.fmt = options.fmt or (["bfloat16", "fp8_block"] if two else ["float32"])
    if "RANK" in os.environ:
        return run(options)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    return subprocess.run([*launcher, *sys.argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
