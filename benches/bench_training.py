"""Time and memory of an experts call forward and backward: ours beside transformers' grouped_mm, in one run.

    python benches/bench_training.py [--device cuda] [--dtypes bfloat16] [--tokens 4096,16384] [--json FILE]

The gate comes first: on the tokens that are timed and on memory that holds NaN, the result and every gradient are
compared with a float32 loop; what is further away than the dtype's tolerance has no time. A pass is one forward and one
backward with a gradient drawn once, gradients set to None before. Candidates take turns, medians are printed; memory is
the most that was allocated during a pass beyond what was there before, gradients of the weights included.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch import Tensor

import routed_experts as rx
from routed_experts.bench import candidates, gate, inputs, report, shapes, timing
from routed_experts.bench.candidates import PEER, reason
from routed_experts.cli.options import split, token_counts

# Beside the result's: the largest of four gradients, each of which is rounded once more on its way.
SLACK = 2

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer:
    """The weights of one shape and dtype, all of which want gradients, and the functions of one call."""

    def __init__(self, name: str, shape: shapes.Shape, dtype: str, device: str, backends: tuple[str, ...]):
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, device
        self.module = inputs.Experts(shape, getattr(torch, dtype), device).requires_grad_()
        self.leaves = {"gate_up_proj": self.module.gate_up_proj, "down_proj": self.module.down_proj}
        experts = rx.ExpertWeights(**self.leaves, activation="silu")
        self.functions: dict[str, Function] = {name: self.ours(experts, name) for name in backends}
        found = candidates.peers(self.module, 0, candidates.Choice((), False, -1))
        self.functions |= {name: function for name, function in found.items() if name == f"{PEER} grouped_mm"}

    def ours(self, experts: rx.ExpertWeights, backend: str) -> Function:
        return lambda x, index, weights: rx.run_experts(x, index, weights, experts, backend=backend)

    def step(self, function: Function, one: inputs.Inputs, cotangent: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Forward and backward; return the result and the gradients of tokens, routing weights and matrices."""
        for leaf in self.leaves.values():
            leaf.grad = None
        x, weights = (t.detach().requires_grad_() for t in (one.x, one.weights))
        out = function(x, one.index, weights)
        out.backward(cotangent)
        return out.detach(), [x.grad, weights.grad, *(leaf.grad for leaf in self.leaves.values())]

    def gate(self, one: inputs.Inputs, cotangent: Tensor) -> tuple[dict[str, float], dict[str, str]]:
        """Largest distance of each candidate's result and gradients; and why those that are wrong or fail have none."""
        dtype, tokens = getattr(torch, self.dtype), one.x.shape[0]
        scratch = max(2 * self.shape.inner, self.shape.hidden) * tokens * self.shape.top_k * dtype.itemsize
        errors, failed = {}, {}
        for name, function in self.functions.items():
            try:
                gate.poison(one.x.device, scratch)
                found = distances(self.module, one, cotangent, *self.step(function, one, cotangent))
                worst = max(found, key=lambda value: (value != value, value))
                if not worst <= SLACK * gate.TOLERANCE[dtype]:
                    raise gate.WrongAnswer(f"{worst:.2e} from float32, allowed {SLACK * gate.TOLERANCE[dtype]:.0e}")
                errors[name] = worst
            except Exception as error:  # a peer may fail in any way, and the others are measured all the same
                failed[name] = reason(error)
        return errors, failed

    def measure(self, tokens: int, routing: str, seconds: float) -> dict[str, Any]:
        """Return one row: errors, times and peaks, the latter two of the candidates that are right."""
        sets = inputs.draw(self.shape, getattr(torch, self.dtype), tokens, routing, self.device)
        cotangent = torch.randn_like(sets[0].x)
        errors, failed = self.gate(sets[0], cotangent)
        functions = {name: self.functions[name] for name in errors}

        def run(function: Function) -> Callable[[], None]:
            def all_sets() -> None:
                for one in sets:
                    self.step(function, one, cotangent)

            return all_sets

        row: dict[str, Any] = {"shape": self.name, "sizes": list(self.shape), "dtype": self.dtype, "tokens": tokens}
        row |= {"routing": routing, "error": errors, "us": {}, "peak_bytes": {}, "failed": failed}
        passes = {}
        for name, function in functions.items():
            try:
                row["peak_bytes"][name] = self.peak(function, sets[0], cotangent)
                passes[name] = run(function)
            except torch.OutOfMemoryError as error:
                row["failed"][name] = reason(error)
        row["us"] = timing.medians(passes, len(sets), self.device, seconds) if passes else {}
        peer = row["us"].get(f"{PEER} grouped_mm")
        row["speedup"] = {name: peer / us for name, us in row["us"].items()} if peer else {}
        return row

    def peak(self, function: Function, one: inputs.Inputs, cotangent: Tensor) -> int | None:
        """Most bytes allocated during a pass, beyond those before it; None where torch does not count."""
        self.step(function, one, cotangent)
        if self.device != "cuda":
            return None
        for leaf in self.leaves.values():
            leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(function, one, cotangent)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def distances(
    layer: inputs.Experts, one: inputs.Inputs, cotangent: Tensor, out: Tensor, grads: list[Tensor]
) -> list[float]:
    """Distances of a result and its gradients (of tokens, routing weights, both matrices) from a float32 loop.

    An expert at a time, and what it adds to the matrices' distances: no second set of gradients has to fit.
    """
    x, scale, grad = one.x.detach().float(), one.weights.detach().float(), cotangent.float()
    wanted = [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(scale)]
    squares = torch.zeros(2, 2, device=x.device)
    for expert in range(layer.num_experts):
        token, slot = torch.where(one.index == expert)
        up, down = layer.gate_up_proj[expert].detach().float(), layer.down_proj[expert].detach().float()
        rows, weight, seen = x[token], scale[token, slot, None], grad[token]
        gate_half, linear = (rows @ up.T).chunk(2, -1)
        part = gate_half.sigmoid()
        unit = gate_half * part * linear
        slots = unit @ down.T
        wanted[0].index_add_(0, token, slots * weight)
        wanted[2][token, slot] = (slots * seen).sum(-1)
        back = (seen @ down) * weight
        inner = torch.cat([back * linear * part * (1 + gate_half * (1 - part)), back * gate_half * part], -1)
        wanted[1].index_add_(0, token, inner @ up)
        for place, matrix in enumerate((inner.T @ rows, (seen * weight).T @ unit)):
            squares[place, 0] += (grads[2 + place][expert].float() - matrix).square().sum()
            squares[place, 1] += matrix.square().sum()
    rest = [gate.distance(got, answer) for got, answer in zip([out, *grads[:2]], wanted, strict=True)]
    return rest + (squares[:, 0] / squares[:, 1]).sqrt().tolist()


def print_row(console: Any, row: dict[str, Any]) -> None:
    """One line a candidate."""
    table = Table(title=f"{row['shape']} {row['dtype']}, T={row['tokens']}, {row['routing']}", min_width=76)
    for column in ("candidate", "us", "x transformers", "peak MiB", "error"):
        table.add_column(column, justify="left" if column == "candidate" else "right", no_wrap=True)
    for name, us in row["us"].items():
        peak = row["peak_bytes"][name]
        memory = "-" if peak is None else f"{peak / 2**20:.0f}"
        table.add_row(name, f"{us:.1f}", report.ratio(row["speedup"].get(name)), memory, f"{row['error'][name]:.1e}")
    console.print(table)
    for name, why in row["failed"].items():
        console.print(f"{name}, failed: {why}", highlight=False, markup=False)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--shapes", "names", default=None, help="Comma-separated names; each device has its own default.")
@click.option("--shape", "sizes", multiple=True, help="E,K,H,I of a shape of one's own; may be repeated.")
@click.option("--dtypes", default="bfloat16")
@click.option("--tokens", default="4096,16384")
@click.option("--routing", default="skewed", help="skewed, balanced")
@click.option("--backends", default=None, help="Default: fused, on a CPU grouped_mm.")
@click.option("--seconds", default=4.0, help="Time for each row, all candidates together.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="Written after every row.")
def main(device, names, sizes, dtypes, tokens, routing, backends, seconds, json_file):
    """Run the benchmark."""
    console, rows = report.terminal(), []
    chosen = split(backends or {"cuda": "fused", "cpu": "grouped_mm"}[device], (*rx.backends(), "auto"))
    counts = token_counts(tokens)
    routings = split(routing, inputs.ROUTINGS)
    found = report.setting(device)
    for (name, shape), dtype in itertools.product(
        shapes.chosen(names, sizes, device).items(), split(dtypes, ("bfloat16", "float16", "float32"))
    ):
        layer = Layer(name, shape, dtype, device, tuple(chosen))
        for count, kind in itertools.product(counts, routings):
            rows.append(layer.measure(count, kind, seconds))
            print_row(console, rows[-1])
            if json_file:
                json_file.write_text(json.dumps({**found, "rows": rows}, indent=1))
        del layer  # before the next one is drawn: two of the largest may not fit


if __name__ == "__main__":
    main()
