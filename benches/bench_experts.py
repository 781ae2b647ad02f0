"""Time of a whole experts call: every backend that runs here beside transformers' own functions, in one run.

    python benches/bench_experts.py [--device cuda] [--dtypes bfloat16,float32] [--tokens 1,8,64,512] [--json FILE]

The gate comes first: an output whose distance from a float32 loop is over the dtype's tolerance has no time.
Calls take turns, so that what else the machine does meets all of them alike; medians are printed, and the ratio
of ``auto`` to the best of transformers' functions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from datetime import date
from importlib import metadata
from types import SimpleNamespace

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import routed_experts as rx

SHAPES = {  # E, K, H, I
    "qwen1.5-moe": (60, 4, 2048, 1408),
    "qwen3-30b": (128, 8, 2048, 768),
    "mixtral-eighth": (8, 2, 2048, 3584),
}
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class Experts(torch.nn.Module):
    """An experts module as transformers' functions expect it."""

    def __init__(self, experts, hidden, inner, dtype, device, generator):
        super().__init__()

        def weight(*shape):
            drawn = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            return torch.nn.Parameter(drawn.to(device, dtype), requires_grad=False)

        self.num_experts = experts
        self.gate_up_proj, self.down_proj = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        self.act_fn = F.silu
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = self.has_post_expert_norm = self._is_expert_parallel = False
        self.config = SimpleNamespace(hidden_act="silu", _experts_implementation=None)

    def _apply_gate(self, up):
        gate, linear = up.chunk(2, -1)
        return self.act_fn(gate) * linear


def skewed_routing(tokens, experts, top_k, generator):
    """Ids and weights of a router with a preference: experts differ in load, as trained ones do."""
    logits = torch.randn(tokens, experts, generator=generator) + 0.7 * torch.randn(experts, generator=generator)
    weights, index = logits.softmax(-1).topk(top_k, dim=-1)
    return index, weights / weights.sum(-1, keepdim=True)


def reference(layer, x, index, weights):
    """A float32 loop over the experts hit."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        up = x[token].float() @ layer.gate_up_proj[expert].float().T
        gate, linear = up.chunk(2, -1)
        down = (F.silu(gate) * linear) @ layer.down_proj[expert].float().T
        out.index_add_(0, token, down * weights[token, slot, None].float())
    return out


def candidates(layer, call, pairs, most_copies):
    """Name to function: transformers' own where it is installed, then ours."""
    x, index, weights = call
    experts = rx.ExpertWeights.from_module(layer)
    found = {}
    try:
        from transformers.integrations import moe
    except ImportError:
        moe = None
    if moe is not None:
        found["transformers grouped_mm"] = lambda: moe.grouped_mm_experts_forward(layer, x, index, weights)
        if pairs <= most_copies:
            found["transformers batched_mm"] = lambda: moe.batched_mm_experts_forward(layer, x, index, weights)
    accepted = rx.select_backend(experts, num_tokens=x.shape[0], num_top_k=index.shape[1]).decisions
    names = [d.backend for d in accepted if d.accepted and (pairs <= most_copies or d.backend != "batched_mm")]
    for name in [*names, "auto"]:
        found[name] = lambda name=name: rx.run_experts(x, index, weights, experts, backend=name)
    return found


def medians(functions, device, seconds):
    """Median microseconds of each function, the functions taking turns."""
    times = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape, dtype, tokens, device, seconds, most_copies):
    """One row: the shape, each candidate's time or why it has none, and the ratio."""
    experts, top_k, hidden, inner = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    layer = Experts(experts, hidden, inner, dtype, device, generator)
    index, weights = (t.to(device) for t in skewed_routing(tokens, experts, top_k, generator))
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    wanted = reference(layer, x, index, weights)
    functions = candidates(layer, (x, index, weights.to(dtype)), tokens * top_k, most_copies)
    errors = {n: ((f().float() - wanted).norm() / wanted.norm()).item() for n, f in functions.items()}
    passed = {name: f for name, f in functions.items() if errors[name] <= TOLERANCE[dtype]}
    times = medians(passed, device, seconds)
    peers = [us for name, us in times.items() if name.startswith("transformers")]
    ratio = times["auto"] / min(peers) if peers and "auto" in times else None
    row = {"shape": shape, "dtype": str(dtype)[6:], "tokens": tokens, "us": times, "error": errors}
    chosen = rx.select_backend(rx.ExpertWeights.from_module(layer), num_tokens=tokens, num_top_k=top_k)
    return row | {"auto_is": f"{chosen.name} {chosen.path}".strip(), "auto_to_best_peer": ratio}


def print_row(console, row):
    """One line a candidate."""
    table = Table(title=f"{row['shape']} {row['dtype']}, T={row['tokens']}, auto is {row['auto_is']}", min_width=60)
    for column in ("candidate", "median us", "error"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for name, error in row["error"].items():
        time_text = f"{row['us'][name]:.1f}" if name in row["us"] else "gate failed"
        table.add_row(name, time_text, f"{error:.1e}")
    console.print(table)
    if row["auto_to_best_peer"] is not None:
        console.print(f"auto / best of transformers: {row['auto_to_best_peer']:.3f}")


def setting(device):
    """What a figure is worth nothing without: command, date, versions and machine."""
    others = ("torch", "triton", "transformers")
    installed = {name: metadata.version(name) for name in others if importlib.util.find_spec(name)}
    installed["routed-experts"] = rx.__version__
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    if device == "cuda":
        machine["device"] = torch.cuda.get_device_name()
    command = " ".join(["python", *sys.argv])
    return {"command": command, "date": f"{date.today()}", "versions": installed, "machine": machine}


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--shapes", default=",".join(SHAPES), help="Comma-separated names.")
@click.option("--dtypes", default="bfloat16,float32")
@click.option("--tokens", default="1,8,64,512")
@click.option("--seconds", default=2.0, help="Time for each row.")
@click.option("--most-copies", default=64, help="Leave batched_mm out above this many (token, slot) pairs.")
@click.option("--json", "json_file", type=click.Path(), default=None)
def main(device, shapes, dtypes, tokens, seconds, most_copies, json_file):
    """Run the benchmark."""
    console, rows = Console(), []
    with torch.inference_mode():
        for shape in shapes.split(","):
            for dtype in dtypes.split(","):
                for count in tokens.split(","):
                    row = measure(shape, getattr(torch, dtype), int(count), device, seconds, most_copies)
                    print_row(console, row)
                    rows.append(row)
    if json_file:
        report = json.dumps({**setting(device), "rows": rows}, indent=1)
        with open(json_file, "w") as file:
            file.write(report)


if __name__ == "__main__":
    main()
