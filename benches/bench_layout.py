"""Time ``build_layout`` against the torch way (stable sort, bincount, cumulative sum, inverse) on one thread.

    python benches/bench_layout.py [--json FILE]

Results are compared before anything is timed. Both ways run in turns, in one process, so that they meet the
same machine; figures are the median and, for a machine that others use too, the best of the turns, in
microseconds a call. The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from routed_experts.layout import build_layout

CASES = [(1, 8, 128), (8, 8, 128), (64, 8, 128), (512, 4, 60), (4096, 8, 256), (65_536, 8, 384)]
TURNS = 200
# Shorter than a time slice: what else runs here then disturbs few of the turns.
TURN_SECONDS = 0.001


def torch_way(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Return order, inverse, counts and int32 offsets as code without a kernel of its own gets them."""
    flat = top_k_index.reshape(-1)
    _, order = flat.sort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = counts.cumsum(0, dtype=torch.int32)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return order, inverse, counts, offsets


def seconds_a_call(call: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def in_turns(ways: list[Callable[[], Any]]) -> list[dict[str, float]]:
    """Median and best microseconds a call of each way, in turns of about TURN_SECONDS."""
    calls = [max(1, int(TURN_SECONDS / min(seconds_a_call(way, 3) for _ in range(3)))) for way in ways]
    turns = [[seconds_a_call(way, n) for way, n in zip(ways, calls, strict=True)] for _ in range(TURNS)]
    by_way = zip(*turns, strict=True)
    return [{"median_us": statistics.median(way) * 1e6, "best_us": min(way) * 1e6} for way in by_way]


def measure(tokens: int, slots: int, num_experts: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(num_experts, (tokens, slots), generator=generator)
    ours, theirs = build_layout(ids, num_experts), torch_way(ids, num_experts)
    if not all(torch.equal(one.long(), other.long()) for one, other in zip(ours[:4], theirs, strict=True)):
        raise SystemExit(f"layouts differ at T={tokens} K={slots} E={num_experts}: nothing timed")
    ways = [lambda: build_layout(ids, num_experts), lambda: torch_way(ids, num_experts)]
    ours_us, torch_us = in_turns(ways)
    case = {"tokens": tokens, "slots": slots, "num_experts": num_experts}
    return case | {"ours": ours_us, "torch": torch_us, "ratio": torch_us["median_us"] / ours_us["median_us"]}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("T", "K", "E", "ours, us", "best", "torch, us", "best", "torch / ours")
    for row in rows:
        shape = [str(row[name]) for name in ("tokens", "slots", "num_experts")]
        figures = [
            f"{row[way][figure]:.2f}" for way in ("ours", "torch") for figure in ("median_us", "best_us")
        ]
        table.add_row(*shape, *figures, f"{row['ratio']:.1f}x")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(*case) for case in CASES]
    show(rows)
    if arguments.json:
        machine = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": 1,
        }
        arguments.json.write_text(json.dumps(machine | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
