"""Host time of a call outside the backend: what run_experts and the ways to it cost, with a backend that does nothing.

    python benches/bench_host.py [--device cuda] [--repeats 200]

One token, the shape of qwen3-30b's routing. A repeat times 100 calls; the median and the best of all repeats are
printed, in microseconds.
"""

from __future__ import annotations

import statistics
import time

import click
import torch
from rich.console import Console
from rich.table import Table

import routed_experts as rx
from routed_experts.transformers_integration.forwards import forward_for

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 16  # weights are not touched: they may be narrow
CALLS = 100


def ways(device):
    """Name to function: one call by every way to a backend."""
    layer = rx.RoutedExperts(EXPERTS, HIDDEN, INNER, device=device, dtype=torch.bfloat16, experts_implementation="nop")
    weights = rx.ExpertWeights(gate_up_proj=layer.gate_up_proj.detach(), down_proj=layer.down_proj.detach())
    live = rx.ExpertWeights.from_module(layer)
    x = torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16)
    index = torch.arange(TOP_K, device=device)[None]
    scores = torch.full((1, TOP_K), 1 / TOP_K, device=device)
    inside = forward_for("nop")
    return {
        "ExpertWeights": lambda: rx.run_experts(x, index, scores, weights, backend="nop"),
        "module": lambda: rx.run_experts(x, index, scores, layer, backend="nop"),
        "from_module": lambda: rx.run_experts(x, index, scores, live, backend="nop"),
        "function for transformers": lambda: inside(layer, x, index, scores),
        "RoutedExperts()": lambda: layer(x, index, scores),
    }


def microseconds(function, repeats):
    """(median, best) of one call, after a call that prepares it."""
    function()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(taken), min(taken)


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--repeats", default=200, show_default=True)
def main(device, repeats):
    """Print the table."""
    rx.register_backend("nop", lambda experts, x, index, weights: x)
    table = Table("call", "no_grad: median us", "best us", "grad: median us", "best us", title=f"host path, {device}")
    for name, function in ways(device).items():
        with torch.no_grad():
            without = microseconds(function, repeats)
        table.add_row(name, *(f"{us:.2f}" for us in (*without, *microseconds(function, repeats))))
    Console().print(table)


if __name__ == "__main__":
    main()
